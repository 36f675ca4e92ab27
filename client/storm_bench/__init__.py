"""What `stormd demo` and `stormd bench` run: no serving daemon and no trainer imports it.

command       the benchmarks, their arguments, and how their figures are shown
link, activations, train, zoo, codec, scan, ternary, gemm   one benchmark each
demo          two small trainers beside their twins without offload; one past the GPU's memory
child_daemon  the daemon that a program measures

What measures the client does so through its public interface, in a process of its own.
"""
