"""C++ kernels: built by `penstock build-kernels`, loaded where they are there."""

# The file's name begins so.
LIBRARY = "penstock_native"
