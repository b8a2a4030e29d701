"""Sampling, scoring and training of diffusion and flow models. Needs torch, so it is imported in workers only.

``roles`` holds the targets that a worker process builds; everything else serves them. ``families`` and ``rewards`` are
registries that the driver may read: they import no torch.
"""
