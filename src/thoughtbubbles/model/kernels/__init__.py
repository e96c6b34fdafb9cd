"""GPU kernels, each beside its plain twin. Nothing here is imported where there is no Triton."""
