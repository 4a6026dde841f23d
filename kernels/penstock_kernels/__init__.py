"""C++ kernels of Penstock's CPU backend, compiled: `penstock` finds them when it is installed beside this package."""
