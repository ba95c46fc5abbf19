package object

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
)

// Names of the programs.
const (
	CoreTC       = coreTCProgWsCoreTc
	CoreXDP      = coreXDPProgWsCoreXdp
	EdgeTC       = edgeTCProgWsEdgeTc
	EdgeXDP      = edgeXDPProgWsEdgeXdp
	FunctionTC   = functionTCProgWsFunctionTc
	FunctionXDP  = functionXDPProgWsFunctionXdp
	CoreOutTC    = coreOutTCProgWsCoreOutTc
	EdgeOutTC    = edgeOutTCProgWsEdgeOutTc
	ExtTC        = extTCProgWsExtTc
	OriginateTC  = originateTCProgWsOriginateTc
	StreamTC     = streamTCProgWsStreamTc
	MPLSTC       = mplsTCProgWsMplsTc
	MPLSOutTC    = mplsOutTCProgWsMplsOutTc
	MPLSCoreXDP  = mplsCoreXDPProgWsMplsCoreXdp
	MPLSEdgeXDP  = mplsEdgeXDPProgWsMplsEdgeXdp
	GatewayTC    = gatewayTCProgWsGatewayTc
	BypassTC     = bypassTCProgWsBypassTc
	MPLSBypassTC = mplsBypassTCProgWsMplsBypassTc
)

// VarConfig is the variable that each object is configured by, an abi.Config.
const VarConfig = coreTCVarCfg

// Object is a program with the maps that it uses.
type Object struct {
	Program string
	Load    func() (*ebpf.CollectionSpec, error) // the caller owns the result
	ELF     *[]byte                              // as it was compiled
}

// All are the objects of all programs. Tests may replace Load.
var All = []Object{
	{CoreTC, loadCoreTC, &_CoreTCBytes},
	{CoreXDP, loadCoreXDP, &_CoreXDPBytes},
	{EdgeTC, loadEdgeTC, &_EdgeTCBytes},
	{EdgeXDP, loadEdgeXDP, &_EdgeXDPBytes},
	{FunctionTC, loadFunctionTC, &_FunctionTCBytes},
	{FunctionXDP, loadFunctionXDP, &_FunctionXDPBytes},
	{CoreOutTC, loadCoreOutTC, &_CoreOutTCBytes},
	{EdgeOutTC, loadEdgeOutTC, &_EdgeOutTCBytes},
	{ExtTC, loadExtTC, &_ExtTCBytes},
	{OriginateTC, loadOriginateTC, &_OriginateTCBytes},
	{StreamTC, loadStreamTC, &_StreamTCBytes},
	{MPLSTC, loadMplsTC, &_MplsTCBytes},
	{MPLSOutTC, loadMplsOutTC, &_MplsOutTCBytes},
	{MPLSCoreXDP, loadMplsCoreXDP, &_MplsCoreXDPBytes},
	{MPLSEdgeXDP, loadMplsEdgeXDP, &_MplsEdgeXDPBytes},
	{GatewayTC, loadGatewayTC, &_GatewayTCBytes},
	{BypassTC, loadBypassTC, &_BypassTCBytes},
	{MPLSBypassTC, loadMplsBypassTC, &_MplsBypassTCBytes},
}

// Alone are the objects of programs with maps of their own, which are of no generation.
var Alone = []Object{
	{StreamLookup, loadStreamLookup, &_StreamLookupBytes},
}

// The program of a worker's namespace.
const (
	StreamLookup    = streamLookupProgWsStreamLookup
	StreamListeners = streamLookupMapWsListeners
	StreamFromNode  = streamLookupVarWsFromNode
)

// LoadStreamLookup reads its object.
func LoadStreamLookup() (*ebpf.CollectionSpec, error) { return loadStreamLookup() }

// LoadMaps reads the maps of a generation, of which each of All has every one: it reads the smallest
// object. The caller owns the result.
func LoadMaps() (map[string]*ebpf.MapSpec, error) {
	smallest := slices.MinFunc(All, func(a, b Object) int { return cmp.Compare(len(*a.ELF), len(*b.ELF)) })
	spec, err := smallest.Load()
	if err != nil {
		return nil, fmt.Errorf("read the object of %s for its maps: %w", smallest.Program, err)
	}
	return spec.Maps, nil
}

// Load reads the object of a program.
func Load(program string) (*ebpf.CollectionSpec, error) {
	for _, o := range All {
		if o.Program == program {
			return o.Load()
		}
	}
	return nil, fmt.Errorf("no program is called %q", program)
}
