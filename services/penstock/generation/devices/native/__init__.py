"""C++ kernels: `penstock build-kernels` builds them, a service loads them if they are built."""

# Prefix of the library's file name.
LIBRARY = "penstock_native"
