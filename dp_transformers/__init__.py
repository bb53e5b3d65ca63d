from .clipping import PerExampleClipper, check_model, register_grad_sampler
