"""Work of a model as CUDA graphs, which the host launches with one call in place of one for each kernel."""
