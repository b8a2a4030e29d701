"""Folds of the event stream: report, trace, metrics, progress. Nothing here keeps a timer of its own.

Imports no scheduler, no worker and no torch; rich is imported when the live view starts. Use the submodules directly:

- :mod:`~digen.observe.fold`: the totals that everything else reads, by worker (``ledger``) and by step (``steps``)
- :mod:`~digen.observe.report`: ``build_report``, ``write_report``, ``text_summary``
- :mod:`~digen.observe.trace`: a Chrome trace for Perfetto
- :mod:`~digen.observe.metrics`, :mod:`~digen.observe.progress`: sinks for ``metrics.jsonl`` and the terminal
- :mod:`~digen.observe.text`: untrusted text made safe to show
"""
