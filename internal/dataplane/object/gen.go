// Package object has the programs of bpf/ as the pinned clang compiles them. Only
// internal/dataplane loads them. The objects are committed, so that building needs
// no clang; `make generate` makes them and their Go again. The types of what their
// maps hold are in internal/abi.
package object

//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types coreTC ../../../bpf/core_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types coreXDP ../../../bpf/core_xdp.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types edgeTC ../../../bpf/edge_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types edgeXDP ../../../bpf/edge_xdp.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types functionTC ../../../bpf/function_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types functionXDP ../../../bpf/function_xdp.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types coreOutTC ../../../bpf/core_out_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types edgeOutTC ../../../bpf/edge_out_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types extTC ../../../bpf/ext_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types originateTC ../../../bpf/originate_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types streamTC ../../../bpf/stream_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types gatewayTC ../../../bpf/gateway_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types bypassTC ../../../bpf/bypass_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types mplsBypassTC ../../../bpf/mpls_bypass_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types mplsTC ../../../bpf/mpls_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types mplsOutTC ../../../bpf/mpls_out_tc.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types mplsCoreXDP ../../../bpf/mpls_core_xdp.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types mplsEdgeXDP ../../../bpf/mpls_edge_xdp.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types streamLookup ../../../bpf/stream_lookup.bpf.c -- -I../../../bpf/include -I../../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
