-- SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
--
-- For Wireshark and tshark, from 4.0 on: the proof TLV of segment routing headers and
-- behind stacks of labels, as docs/protocol defines it.
--
--   tshark -X lua_script:tools/wireshark/waystamp.lua -r FILE -O waystamp
--
-- It runs after the packet's own dissectors, and reads every SRH that they found,
-- also one that an ICMP error quotes. Wireshark's dissector of the SRH leaves TLVs
-- alone, and a script cannot call it. Without the keys nobody can say whether a
-- proof is right. What is refused whatever the plan says has the refusal's name.

local PAD1 = 0
local PROOF = 252 -- WS_TLV_TYPE
local PROOF_LENGTH = 22 -- WS_TLV_LEN
local ROUTING_TYPE_SRH = 4
local SRH_LENGTH = 8 -- without segments and TLVs
local SEGMENT_LENGTH = 16
local FRAMES_MAX = 63 -- WS_RND_FRAMES_MAX

local waystamp = Proto("waystamp", "Proof of transit, waystamp")

local schemes = { [0] = "pot", [1] = "opot", [2] = "keyed", [3] = "keyed-flow" }

local fields = {
	type = ProtoField.uint8("waystamp.type", "Type", base.DEC),
	length = ProtoField.uint8("waystamp.length", "Length", base.DEC),
	scheme = ProtoField.uint8("waystamp.scheme", "Scheme", base.DEC, schemes),
	epoch = ProtoField.uint8("waystamp.epoch", "Epoch", base.DEC),
	path = ProtoField.uint32("waystamp.path", "Path", base.HEX),
	rnd = ProtoField.uint64("waystamp.rnd", "RND", base.HEX),
	zero = ProtoField.uint8("waystamp.rnd.zero", "Zero", base.DEC, nil, 0xf0),
	lane = ProtoField.uint16("waystamp.rnd.lane", "Lane", base.DEC, nil, 0x0fff),
	frames = ProtoField.uint8("waystamp.rnd.frames", "Frames in the train", base.DEC),
	counter = ProtoField.uint64("waystamp.rnd.counter", "Counter", base.DEC),
	cml = ProtoField.uint64("waystamp.cml", "CML", base.HEX),
}
waystamp.fields = fields

local function refusal(name, text)
	return ProtoExpert.new("waystamp." .. name, text .. " (" .. name .. ")", expert.group.PROTOCOL, expert.severity.ERROR)
end

local experts = {
	overrun = refusal("tlv-overrun", "TLV runs past the end of the SRH"),
	length = refusal("tlv-length", "Length of the proof TLV is not 22"),
	alignment = refusal("tlv-alignment", "Proof TLV is not on an 8-byte boundary of the SRH"),
	duplicate = refusal("tlv-duplicate", "SRH has more than one proof TLV"),
	number = refusal("number", "No headend gives such a number"),
	scheme = ProtoExpert.new("waystamp.scheme.unknown", "Scheme is not known", expert.group.PROTOCOL, expert.severity.WARN),
	path = ProtoExpert.new("waystamp.path.zero", "No path has number 0", expert.group.PROTOCOL, expert.severity.WARN),
	cut = ProtoExpert.new("waystamp.cut", "The capture ends within the TLV", expert.group.UNDECODED, expert.severity.NOTE),
}
waystamp.experts = experts

local routing_headers = Field.new("ipv6.routing")

-- number shows the parts of an RND: bits 63-60 zero, 59-48 lane, 47-42 frames - 1,
-- 41-0 counter.
local function number(tvb, at, tree)
	local zero = tvb(at, 1):bitfield(0, 4)
	local frames = tvb(at + 2, 1):bitfield(0, 6) + 1
	local counter = tvb(at + 2, 6):bitfield(6, 42)
	tree:add(fields.zero, tvb(at, 1))
	tree:add(fields.lane, tvb(at, 2))
	tree:add(fields.frames, tvb(at + 2, 1), frames)
	tree:add(fields.counter, tvb(at + 2, 6), counter)
	if zero ~= 0 or frames > FRAMES_MAX or counter == UInt64(0) then
		tree:add_proto_expert_info(experts.number)
	end
end

-- proof shows the TLV at an offset, all of whose bytes are there.
local function proof(tvb, at, root)
	local scheme, epoch, path = tvb(at + 2, 1):uint(), tvb(at + 3, 1):uint(), tvb(at + 4, 4):uint()
	local tree = root:add(waystamp, tvb(at, 2 + PROOF_LENGTH))
	tree:append_text(string.format(": %s, path %08x, epoch %d", schemes[scheme] or "scheme " .. scheme, path, epoch))
	tree:add(fields.type, tvb(at, 1))
	tree:add(fields.length, tvb(at + 1, 1))
	local shown = tree:add(fields.scheme, tvb(at + 2, 1))
	if not schemes[scheme] then
		shown:add_proto_expert_info(experts.scheme)
	end
	tree:add(fields.epoch, tvb(at + 3, 1))
	shown = tree:add(fields.path, tvb(at + 4, 4))
	if path == 0 then
		shown:add_proto_expert_info(experts.path)
	end

	shown = tree:add(fields.rnd, tvb(at + 8, 8))
	if schemes[scheme] == "opot" then
		shown:append_text(" under the mask of this link")
	else
		number(tvb, at + 8, shown)
	end
	tree:add(fields.cml, tvb(at + 16, 8))
	return tree
end

-- broken shows a TLV that cannot be read as a proof: its type, and its length
-- where it has one.
local function broken(tvb, at, stop, root, expert)
	local tree = root:add(waystamp, tvb(at, stop - at))
	tree:add(fields.type, tvb(at, 1))
	if at + 1 < stop then
		tree:add(fields.length, tvb(at + 1, 1))
	end
	tree:add_proto_expert_info(expert)
end

-- srh reads the TLVs of the routing header at an offset, in the way and with the
-- refusals of bpf/lib/encap/tlv_tc.h, which ends at the first one.
local function srh(tvb, start, root)
	local there = tvb:captured_len()
	if start + SRH_LENGTH > there or tvb(start + 2, 1):uint() ~= ROUTING_TYPE_SRH then
		return
	end
	local stop = start + SRH_LENGTH + 8 * tvb(start + 1, 1):uint()
	local at = start + SRH_LENGTH + SEGMENT_LENGTH * (tvb(start + 4, 1):uint() + 1)
	local found = false
	while at < math.min(stop, there) do
		local type = tvb(at, 1):uint()
		if type == PAD1 then
			at = at + 1
		elseif at + 1 >= stop then
			broken(tvb, at, stop, root, experts.overrun)
			return
		elseif at + 1 >= there then
			return
		else
			local length = tvb(at + 1, 1):uint()
			local behind = at + 2 + length
			if behind > stop then
				broken(tvb, at, math.min(stop, there), root, experts.overrun)
				return
			elseif type == PROOF and length ~= PROOF_LENGTH then
				broken(tvb, at, math.min(behind, there), root, experts.length)
				return
			elseif type == PROOF and behind > there then
				broken(tvb, at, there, root, experts.cut)
				return
			elseif type == PROOF then
				local tree = proof(tvb, at, root)
				if (at - start) % 8 ~= 0 then
					tree:add_proto_expert_info(experts.alignment)
					return
				elseif found then
					tree:add_proto_expert_info(experts.duplicate)
					return
				end
				found = true
			end
			at = behind
		end
	end
end

function waystamp.dissector(_, _, root)
	for _, header in ipairs({ routing_headers() }) do
		srh(header.source, header.offset, root)
	end
end

register_postdissector(waystamp)

-- Behind a stack with a service label: a word, the proof, and the inner packet. Which labels
-- are services says the domain. Wireshark asks by the last label, which is that of a flow on
-- the last link, so that any may be; what is not ours it gets back.
local WORD_LENGTH = 4
local SERVICES = 65536
local ENTROPY_INDICATOR = 7
local INNER = { [4] = "ip", [41] = "ipv6" }

local behind = Proto("waystamp_labels", "Word behind labels, waystamp")
behind.prefs.services = Pref.uint("First service label", 100000, "domain.mpls.services; all others are the 65535 behind it")

local word = {
	version = ProtoField.uint8("waystamp.word.version", "Version", base.DEC),
	flags = ProtoField.uint8("waystamp.word.flags", "Flags", base.HEX),
	next = ProtoField.uint8("waystamp.word.next", "Next header", base.DEC, { [4] = "IPv4", [41] = "IPv6" }),
}
behind.fields = word

local wrong = {
	cut = ProtoExpert.new("waystamp.word.cut", "The capture ends within the word, the proof or the inner packet", expert.group.UNDECODED, expert.severity.NOTE),
	inner = ProtoExpert.new("waystamp.inner", "The inner packet cannot be read to its end", expert.group.MALFORMED, expert.severity.ERROR),
}
local function wrong_word(name, text)
	wrong[name] = ProtoExpert.new("waystamp." .. name, text .. " (" .. name .. ")", expert.group.PROTOCOL, expert.severity.ERROR)
end
wrong_word("word-truncated", "The packet ends within the word")
wrong_word("word-version", "Version of the word is not 0")
wrong_word("word-next", "What is inside is neither IPv4 nor IPv6")
wrong_word("proof-truncated", "The packet ends within the proof")
wrong_word("tlv-missing", "No proof is behind the word")
behind.experts = wrong

local stack_labels = Field.new("mpls.label")

-- has_service tells whether the stack has a service label, wherever it is.
local function has_service()
	local stack, first = { stack_labels() }, behind.prefs.services
	table.sort(stack, function(a, b) return a.offset < b.offset end)
	for i, label in ipairs(stack) do
		local entropy = i > 1 and stack[i - 1].value == ENTROPY_INDICATOR
		if not entropy and label.value >= first and label.value < first + SERVICES then
			return true
		end
	end
	return false
end

-- is_ours tells whether these bytes are a word with a proof, though no label says so.
local function is_ours(tvb, there)
	return there >= WORD_LENGTH + 2 and tvb(0, 1):uint() == 0 and INNER[tvb(3, 1):uint()] ~= nil
		and tvb(WORD_LENGTH, 1):uint() == PROOF and tvb(WORD_LENGTH + 1, 1):uint() == PROOF_LENGTH
end

-- In the way and with the refusals of labels_parse in bpf/lib/encap/mpls.h, which ends at the
-- first one.
function behind.dissector(tvb, pinfo, root)
	local there, all = tvb:captured_len(), tvb:reported_len()
	if not has_service() and not is_ours(tvb, there) then
		return 0
	end
	local tree = root:add(behind, tvb(0, math.min(WORD_LENGTH, there)))
	local behind_proof = WORD_LENGTH + 2 + PROOF_LENGTH
	if there < WORD_LENGTH then
		tree:add_proto_expert_info(all < WORD_LENGTH and wrong["word-truncated"] or wrong.cut)
		return there
	end
	local version, next = tvb(0, 1):uint(), tvb(3, 1):uint()
	tree:add(word.version, tvb(0, 1))
	tree:add(word.flags, tvb(1, 1))
	tree:add(word.next, tvb(3, 1))
	local bad
	if version ~= 0 then
		bad = "word-version"
	elseif not INNER[next] then
		bad = "word-next"
	elseif all < behind_proof then
		bad = "proof-truncated"
	elseif there < behind_proof then
		bad = "cut"
	elseif tvb(WORD_LENGTH, 1):uint() ~= PROOF then
		bad = "tlv-missing"
	elseif tvb(WORD_LENGTH + 1, 1):uint() ~= PROOF_LENGTH then
		bad = "length"
	end
	if bad then
		tree:add_proto_expert_info(wrong[bad] or experts[bad])
		return there
	end
	proof(tvb, WORD_LENGTH, root)
	-- An error in another's dissector would end this one, and look as if it were its own.
	if there > behind_proof and not pcall(Dissector.call, Dissector.get(INNER[next]), tvb(behind_proof):tvb(), pinfo, root) then
		tree:add_proto_expert_info(there < all and wrong.cut or wrong.inner)
	end
	return there
end

DissectorTable.get("mpls.label"):add("16-1048575", behind)
