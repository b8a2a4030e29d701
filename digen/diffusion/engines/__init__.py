"""Engines that generate in the place of diffusers. Importing this package imports none of them, and no torch."""
