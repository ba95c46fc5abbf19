package dataplane

// The objects are committed, so that building needs no clang; make generate
// rebuilds them with the one pinned in the Makefile.

//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -type ws_event -type ws_ruleset coreTC ../../bpf/core_tc.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types coreXDP ../../bpf/core_xdp.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types edgeTC ../../bpf/edge_tc.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types edgeXDP ../../bpf/edge_xdp.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types functionTC ../../bpf/function_tc.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types functionXDP ../../bpf/function_xdp.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types coreOutTC ../../bpf/core_out_tc.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types edgeOutTC ../../bpf/edge_out_tc.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
//go:generate go tool bpf2go -cc $BPF_CLANG -strip $BPF_STRIP -target bpfel -no-global-types extTC ../../bpf/ext_tc.bpf.c -- -I../../bpf/include -I../../bpf -nostdinc -mcpu=v3 -O2 -g -Wall -Wextra -Werror
