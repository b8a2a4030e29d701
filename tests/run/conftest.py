"""Folders to run ``digen`` in, and one finished run that others are compared with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.run.harness import PLUGINS, Site


@pytest.fixture(scope="session", autouse=True)
def _plugins() -> Iterator[None]:
    """Rewards are located in this process too."""
    sys.path.insert(0, str(PLUGINS))
    yield
    sys.path.remove(str(PLUGINS))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder of the test's own."""
    found = Site(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A finished ``digen train`` of :data:`TINY`: what others are compared with.

    Every version of it is evaluated meanwhile, and none of the others': that they agree shows that it leaves no trace.
    """
    found = Site(tmp_path_factory.mktemp("undisturbed"))
    command = found.start(evaluation__every=1, evaluation__num_prompts=2, evaluation__samples_per_prompt=3)
    assert command.wait() == 0, command.stderr
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """``main`` configures structlog; other tests must not notice."""
    yield
    structlog.reset_defaults()
