"""A module that can be found but not imported."""

import a_module_that_is_not_installed  # type: ignore[import-not-found]  # noqa: F401 - that is its point
