package main

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/await"
)

// programs are those of this machine that the tests call.
var programs = []string{"busybox", "ip", "tc", "nft", "ping"}

// frr are the daemons of a router, which Debian has outside of PATH.
var frr = []string{"/usr/lib/frr/zebra", "/usr/lib/frr/ospfd"}

// step is a program to run: a package's tests, or a command.
type step struct {
	name string
	pkg  string   // folder of the tests; "": a command
	args []string // of the command
	run  []string // the tests of pkg, as they begin, or TEST$/^(SUBTEST|…)$; nil: all
	skip []string // of these, what another step or kernel has
	// asked: it runs only where -step names it.
	asked bool
	// shows: its output is printed when it has passed, too.
	shows bool
	more  []string // programs of this machine that it calls besides
}

func (s step) binary() string { return "/tests/" + strings.ReplaceAll(s.pkg, "/", "-") + ".test" }

// has: the test, or the one that it is a part of, is among those that the step runs.
func (s step) has(test string) bool {
	name, _, _ := strings.Cut(test, "/")
	return s.run == nil || slices.ContainsFunc(s.run, func(begins string) bool {
		begins, _, _ = strings.Cut(begins, "/")
		whole, exact := strings.CutSuffix(begins, "$")
		return name == whole || !exact && strings.HasPrefix(name, begins)
	})
}

// functionWays are those of TestTCPThroughAFunctionLosesNoStamp: each way of handing packets to a function, IP version and
// encapsulation, and not all of them with each other, which are thirty laboratories with WAYSTAMP_ENCAPSULATIONS=all.
var functionWays = []string{
	"nftables,_cut,_IPv6", "nftables,_kept,_IPv4", "nftables,_kept,_by_content,_IPv6", "one_interface,_IPv4_over_labels",
	"user_space,_IPv6_over_labels", "own_kernel,_IPv4", "own_kernel,_cut_and_merged_on_the_way,_IPv6",
}

// allSteps is what each kernel must do. Without KVM all takes some ten times as
// long: of the data path's tests those are here that load and attach the programs and
// send packets through each of them, of those end to end one for each way through a domain.
func allSteps() []step {
	return []step{
		{name: "host", pkg: "internal/host"},
		{name: "doctor", pkg: "internal/doctor", run: []string{
			"TestStockVRFIsFound$", "TestEachFaultOfANodeIsFound$", "TestProgramsBehindOursAreNone$", "TestReversePathFilterIsAsTheKernelsOwn$",
		}},
		{name: "dataplane", pkg: "internal/dataplane", run: []string{
			"TestKernelAndPermissionsAreEnough", "TestProgramStampsAsTheModelDoes", "TestProgramVerifiesAsTheModelDoes",
			"TestProgramsDoWithScapysPacketsWhatTheyMust", "TestProgramsDoWithScapysLabelsWhatTheyMust", "TestEveryReasonIsProduced", "TestEveryRoleSendsToTheNeighbour",
			"TestHeadendStampsTrains", "TestInnerPacketForTheEgressIsDelivered", "TestPacketThatWasATunnelsIsEncapsulatedAgain",
			"TestTagsAreNoWay", "TestTagsOnACoreInterface", "TestTwoCPUsAcceptEachNumberExactly",
			"TestFunctionInANamespaceIsPassed", "TestFunctionInTheNodesOwnKernelIsPassed", "TestSuperPacketIsCutSoThatEachFrameHasItsHeader", "TestSuperPacketOfIPv4GetsItsHeaderBack",
			"TestDataPathOutlivesItsProcess", "TestProgramOfEachRoleIsOnItsInterfaceAndFirst", "TestProgramBeforeOursIsReported",
			"TestOtherLocatorGetsNewProgramsOnTheSameLinks", "TestFailureAtAnyStepLeavesWhatWasThere", "TestDeathAtAnyStepIsMendedByTheNextProcess",
			"TestReconcileRepairsWhatOthersHaveDone", "TestInterfaceThatComesBackIsGuardedAgain", "TestDetachLeavesNothing", "TestPinsMove",
			"TestFilter", "TestForeignFilter", "TestFailureAtAnyStepOfAFilter",
		}},
		{name: "demo", args: []string{guestProgram, "demo"}},
		{name: "e2e", pkg: "test/e2e", run: []string{
			"TestEveryFrameIsStampedByAllAndVerified", "TestIPv4GoesThroughTheChain", "TestIPv4SuperPacketsAreCutOnTheWay",
			"TestNothingTamperedWithGetsThrough", "TestStoppedAgentsLeaveDataPathAndGuard", "TestChainsComeAndGoUnderTraffic",
			"TestOwnTrafficTakesAChain", "TestSendersLearnWhatAChainTakes", "TestCompressedAndReducedChainsCarryTCP", "TestTheKernelsEndIsAWaypoint",
		}},
		{name: "proxies", pkg: "test/e2e", run: []string{"TestTCPThroughAFunctionLosesNoStamp$/^(" + strings.Join(functionWays, "|") + ")$"}},
		// What the kernel of make test lacks: bonds, VLANs, SCTP, netem; its own routers of labels, and FRR's. Besides, bridges and a macvlan.
		{name: "links", pkg: "test/e2e", run: []string{"TestChainOver", "TestStockChain", "TestStockDuplicates", "TestStockLoss", "TestStockReordering", "TestStockSCTP"}},
		{name: "mpls", pkg: "test/e2e", run: []string{"TestStockFRR", "TestStockLabels", "TestStockRouters"}, more: frr},
		{name: "xdp", pkg: "test/e2e", run: []string{"TestXDP", "TestStockXDP"}},
		{name: "xdp-programs", pkg: "internal/dataplane", run: []string{"TestXDP", "TestFunctionBehindDevicesWithXDPIsPassedByXDP$"}},
		{name: "own", pkg: "test/e2e", run: []string{"TestNftablesChoosesAChain$", "TestOwnSocketsLearnWhatAChainTakes$", "TestAgentsNeedNoRoot$", "TestPinsOfRootMove"}, more: []string{"setpriv"}},
		{name: "functions", pkg: "test/e2e", asked: true, run: []string{"TestTheExampleOfFunctionsRuns$", "TestWhatNetfilterDoesToAPacketAndItsProof$"}},
		{name: "bench", pkg: "internal/bench", asked: true, run: []string{"TestHopOnTheKernel$"}},
		// For kernels older than the oldest, which come by -deb.
		{name: "old", pkg: "test/e2e", asked: true, run: []string{"TestStockOldKernel"}},
	}
}

// gateSteps is what each kernel must do for every change: it loads all programs in all
// configurations, runs them on the packets that Scapy made, and attaches one of each role.
func gateSteps() []step {
	return []step{{name: "gate", pkg: "internal/dataplane", run: []string{
		"TestVerifierHasRoom$", "TestProgramsDoWithScapysPacketsWhatTheyMust$", "TestProgramOfEachRoleIsOnItsInterfaceAndFirst$",
	}, skip: []string{
		"TestProgramsDoWithScapysPacketsWhatTheyMust/as_on_Linux_6.1", // there it is
	}}}
}

// chosen are the steps of these names, with commas between; "": all that need not be asked for.
func chosen(all []step, names string) (steps []step, err error) {
	if names == "" {
		return slices.DeleteFunc(slices.Clone(all), func(s step) bool { return s.asked }), nil
	}
	list := strings.Split(names, ",")
	for _, name := range list {
		if !slices.ContainsFunc(all, func(s step) bool { return s.name == name }) {
			return nil, fmt.Errorf("there is no step %q; expect one of %s", name, stepNames(all))
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(s step) bool { return !slices.Contains(list, s.name) }), nil
}

func stepNames(steps []step) string {
	var names []string
	for _, s := range steps {
		names = append(names, s.name)
	}
	return strings.Join(names, ", ")
}

// shellName is the step of a machine with a shell.
const shellName = "shell"

// shellPrograms are those that help to look at what a kernel does, where this machine has them.
var shellPrograms = []string{"bpftool", "tcpdump", "ethtool", "strace", "socat"}

// shellStep is a shell with the environment of the steps' tests.
func shellStep(steps []step) guestStep {
	text := []string{"Tests, each in its folder of " + guestTree + ", which is read-only:"}
	for _, s := range steps {
		if s.pkg != "" {
			text = append(text, "  cd "+path.Join(guestTree, s.pkg)+" && "+s.binary()+" -test.v -test.run TestX")
		}
	}
	text = append(text, "exit turns the machine off; so does Ctrl-A x.")
	return guestStep{Name: shellName, Args: []string{"/bin/sh", "-i"}, Dir: guestTree, Env: guestEnv, Shell: true, Text: strings.Join(text, "\n")}
}

// guestPatience: an emulated CPU is about ten times slower, and few deadlines are short enough to need all of it. A
// test that hangs is to fail by its own deadline, before the machine is ended for its silence.
const guestPatience = "5"

var guestEnv = []string{"WAYSTAMP_PROGRAM=" + guestProgram, "LANG=C.UTF-8", await.PatienceVariable + "=" + guestPatience}

// forGuest is the step without what a kernel cannot. only: a pattern that tests
// must match besides.
func (s step) forGuest(skip []string, only string) guestStep {
	skip = slices.Concat(skip, s.skip)
	g := guestStep{
		Name: s.name, Args: s.args, Dir: path.Join(guestTree, s.pkg),
		Env: guestEnv,
	}
	if s.pkg == "" {
		return g
	}
	run := "^" + strings.Join(s.run, "|^")
	if only != "" {
		run = only
	}
	g.Args = []string{s.binary(), "-test.v", "-test.timeout=60m", "-test.run=" + run}
	if len(skip) > 0 {
		var quoted []string
		for _, t := range skip {
			quoted = append(quoted, "^"+strings.ReplaceAll(regexp.QuoteMeta(t), "/", "$/^")+"$")
		}
		g.Args = append(g.Args, "-test.skip="+strings.Join(quoted, "|"))
	}
	return g
}
