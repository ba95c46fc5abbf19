# waystamp. `make demo` shows it, `make test` tests it; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The one compiler of the committed eBPF objects. Another version writes other
# bytes, so make generate refuses it.
CLANG_VERSION := 19.1.7
BPF_CLANG := clang-19
BPF_STRIP := llvm-strip-19
CLANG_FORMAT := clang-format-19

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unreleased)
MODULE := github.com/waystamp/waystamp
# Packages whose tests need neither root nor a kernel feature.
UNIT := ./internal/abi ./internal/agent ./internal/api ./internal/arch ./internal/await ./internal/cli ./internal/command ./internal/controller ./internal/event ./internal/explain ./internal/gateway ./internal/gateway/policy ./internal/gateway/worker ./internal/identity ./internal/manifest \
	./internal/member ./internal/model ./internal/mpls ./internal/pcapng ./internal/plan ./internal/pot ./internal/routing ./internal/srv6 ./internal/store ./internal/stream/function ./internal/tables ./internal/yamlfile ./test/oracle ./tools/...

# The packages whose tests take longest, and wait a good part of it: they begin
# first, beside each other.
LONG := ./internal/dataplane ./test/e2e

UNIT += ./internal/dataplane/object ./internal/metrics ./internal/ipfix ./internal/flowrecords ./internal/seal

export CGO_ENABLED := 0

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: deps-run build ## see it: a chain on this machine, proven and then tampered with (root)
	@bin/waystamp demo $(DEMO_ARGS)

.PHONY: test
test: deps-run deps-test build ## every test, in the kernel and end to end (root)
	@[ "$$(id -u)" = 0 ] || { echo "make test needs root: it loads programs and makes network namespaces" >&2; exit 1; }
	@go build -buildvcs=false -o bin/ ./tools/testgate
	@bin/testgate -skips test/skips.golden -- -timeout 60m $(LONG) ./cmd/... ./internal/... ./tools/... ./test/...

# One kernel, step or test: make test-kernels KERNEL=6.1 STEP=e2e RUN=TestX. PAGE=docs/reference/kernels.md writes its table.
KERNELS = $(if $(KERNEL),-only '$(KERNEL)') $(if $(STEP),-step '$(STEP)') $(if $(RUN),-run '$(RUN)') $(if $(PAGE),-page '$(PAGE)') $(KERNELS_ARGS)

# Not by go run, which would not pass a SIGTERM on, and leave a guest.
.PHONY: bin/kernels
bin/kernels:
	@mkdir -p bin; go build -buildvcs=false -o bin/kernels ./test/kernels

.PHONY: test-kernels
test-kernels: deps-kernels bin/kernels ## the same, a part of them, on Debian's kernels 6.1 and 6.12 in qemu (no root; KERNEL=6.1 STEP=e2e RUN=TestX)
	@exec bin/kernels $(KERNELS)

.PHONY: shell-kernel
shell-kernel: deps-kernels bin/kernels ## a shell on one of them, with the tests (KERNEL=6.12)
	@[ -n "$(KERNEL)" ] || { echo "say which kernel: make shell-kernel KERNEL=6.12" >&2; exit 2; }
	@exec bin/kernels -shell $(KERNELS)

.PHONY: test-guests
test-guests: build deps-kernels ## the Debian package on three machines with systemd, in qemu (root; RELEASE=trixie for that release, STEPS=reboot for one step, NIC=e1000e for that network card, QUEUES=4 for so many queues, FROM=COMMIT to upgrade from that)
	@tools/deps.sh bare
	@NIC=$(NIC) QUEUES=$(QUEUES) FROM=$(FROM) test/guests/run.sh $(or $(RELEASE),bookworm) $(STEPS)

.PHONY: check-kernels
check-kernels: deps-kernels bin/kernels ## what every change must pass on the oldest and the newest kernels, in qemu (no root)
	@exec bin/kernels -gate $(KERNELS)

.PHONY: unit
unit: ## the tests that need no root
	@echo "unit: the tests that need no root"
	@go test -count=1 $(UNIT)

.PHONY: race
race: ## the same under the race detector (needs gcc)
	@CGO_ENABLED=1 go test -race -count=1 $(filter-out ./internal/gateway/worker,$(UNIT)) # which confines itself: not with cgo

.PHONY: check-arm
check-arm: bin/kernels ## the same on a kernel for arm64 (no root)
	@tools/deps.sh arm64
	@exec bin/kernels -gate -arch arm64 $(KERNELS)

.PHONY: check
check: deps-clang check-format check-vet check-rules check-generated ## formats, vet, house rules, generated files fresh

.PHONY: check-format
check-format: deps-clang
	@echo "check: format"
	@bad=$$(gofmt -l cmd internal test tools); [ -z "$$bad" ] || \
		{ printf 'gofmt would change:\n%s\nrun make format\n' "$$bad" >&2; exit 1; }
	@find bpf -name '*.[ch]' -print0 | xargs -0 $(CLANG_FORMAT) --dry-run -Werror || { echo "run make format" >&2; exit 1; }

.PHONY: check-vet
check-vet:
	@echo "check: go vet"
	@go vet ./...
	@go vet -tags stock ./test/e2e

.PHONY: check-rules
check-rules:
	@echo "check: house rules (internal/arch)"
	@go test -count=1 ./internal/arch

# In a copy, so that a check changes nothing and several can run at once.
.PHONY: check-generated
check-generated: clang-pinned
	@echo "check: generated files are what the sources make"
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	cp -a Makefile go.mod go.sum bpf internal tools docs examples "$$tmp"; \
	rm -f "$$tmp"/internal/dataplane/object/*_bpfe[lb].{go,o} "$$tmp"/internal/abi/{constants,enums,types}.go \
		"$$tmp"/docs/reference/{refusals,domain-file,commands,json,metrics}.md; \
	rm -f "$$tmp"/internal/rpc/waystampv1/{waystamp.pb.go,waystampv1connect/waystamp.connect.go}; \
	$(MAKE) --no-print-directory -s -C "$$tmp" generate; \
	for d in internal/dataplane/object internal/abi internal/rpc docs/reference; do \
		diff -r "$$d" "$$tmp/$$d" || { echo "$$d is not what make generate makes; run it and commit the result" >&2; exit 1; }; \
	done

.PHONY: generate
generate: clang-pinned ## eBPF objects, their Go, internal/abi, internal/rpc and reference pages, with clang-19
	@sed -n 's/^.* -no-global-types \([A-Za-z0-9]*\) .*/\1/p' internal/dataplane/object/gen.go | \
		BPF_CLANG=$(BPF_CLANG) BPF_STRIP=$(BPF_STRIP) xargs -P "$$(nproc)" -I {} go generate -run ' {} ' ./internal/dataplane/object # each by itself: on all CPUs
	@go run ./tools/abigen -clang $(BPF_CLANG)
	@go run ./tools/protogen
	@go run ./tools/refgen

.PHONY: clang-pinned
clang-pinned: deps-clang
	@for tool in $(BPF_CLANG) $(BPF_STRIP); do \
		have=$$($$tool --version | sed -n 's/.*version \([0-9.]*\).*/\1/p' | head -n 1); \
		[ "$$have" = $(CLANG_VERSION) ] || \
		{ echo "$$tool is version $$have; the committed objects are made with $(CLANG_VERSION), as in Debian 12" >&2; exit 1; }; \
	done

.PHONY: build
build: ## bin/waystamp and bin/waystamp-lab
	@mkdir -p bin; tmp=$$(mktemp -d bin/.build.XXXXXX); trap 'rm -rf "$$tmp"' EXIT; \
	go build -trimpath -buildvcs=false -ldflags '-X $(MODULE)/internal/command.version=$(VERSION)' -o "$$tmp/" ./cmd/...; \
	mv -f "$$tmp"/waystamp "$$tmp"/waystamp-lab bin/

ARCH ?= $(shell go env GOARCH)
HOSTARCH := $(shell go env GOHOSTARCH)

# Completions and man pages come from builds for this machine, whatever ARCH is.
.PHONY: package
package: ## Debian packages in dist/, the same bytes for the same commit (ARCH=arm64 for another architecture)
	@mkdir -p dist; tmp=$$(mktemp -d dist/.build.XXXXXX); trap 'rm -rf "$$tmp"' EXIT; mkdir "$$tmp/run"; \
	GOARCH=$(ARCH) go build -trimpath -buildvcs=false -ldflags '-s -w -X $(MODULE)/internal/command.version=$(VERSION)' -o "$$tmp/" ./cmd/...; \
	GOARCH=$(HOSTARCH) go build -trimpath -buildvcs=false -o "$$tmp/run/" ./cmd/waystamp; \
	GOARCH=$(HOSTARCH) PACKAGE_RUN="$$tmp/run" packaging/build.sh "$$tmp" $(ARCH) dist

.PHONY: format
format: deps-clang ## gofmt and clang-format, in place
	@gofmt -w cmd internal test tools
	@find bpf -name '*.[ch]' -print0 | xargs -0 $(CLANG_FORMAT) -i

.PHONY: attacks
attacks: deps-run ## every attack on every scheme, in a lab; writes the table of SECURITY.md (root)
	@go test -count=1 -run TestEveryAttackHasItsOutcome ./test/attack -update

T := 60s
PACKETS := 10000000

.PHONY: fuzz
fuzz: ## every fuzz target for T=60s each, and ten million packets against the reference model (root)
	@WAYSTAMP_FUZZ_PACKETS=$(PACKETS) go test -count=1 -timeout 60m -run TestProgramsDoWhatTheOracleSays ./internal/dataplane
	@for p in $$(go list ./internal/...); do \
		for f in $$(go test -list '^Fuzz' "$$p" | grep '^Fuzz' || true); do \
			echo "fuzz: $$p $$f"; go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(T) "$$p"; \
		done; \
	done

.PHONY: deps
deps: deps-run deps-test deps-clang ## what all targets need, through apt; go modules (root)
	@go mod download

.PHONY: deps-run
deps-run:
	@tools/deps.sh run

.PHONY: deps-test
deps-test:
	@tools/deps.sh test

.PHONY: deps-kernels
deps-kernels:
	@tools/deps.sh kernels

.PHONY: deps-clang
deps-clang:
	@tools/deps.sh clang

.PHONY: clean
clean: ## what make built
	@rm -rf bin dist
