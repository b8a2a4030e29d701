"""Can the fault schedules fail? Defects are put into the scheduler one by one, and each must be caught.

    python experiments/mutations.py [--seeds 2000] [--only NAME]      some minutes; prints seeds until each was caught

A defect is a piece of source that is replaced in memory: nothing is written. It is caught at the first seed of
``experiments/faults.py`` whose run does not end as it should.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import ModuleType

from digen import sched  # noqa: F401 - every module of it is loaded before one is changed


@dataclass(frozen=True)
class Defect:
    """A mistake that somebody could make."""

    name: str
    module: str
    """Below ``digen``."""
    good: str
    """Source that occurs in the module once."""
    bad: str
    """What stands there with the defect."""


DEFECTS = (
    Defect("no fencing", "sched.loop", "if task.worker.task is not task:", "if False:"),
    Defect("void results count", "sched.loop", "if task.void or (", "if ("),
    Defect(
        "rolled-back tasks stay valid",
        "sched.state",
        'task.void = task.kind != "load" or task.version > version',
        "pass",
    ),
    Defect(
        "window off by one at admission", "sched.admission", "0 < staleness < window and", "0 < staleness <= window and"
    ),
    Defect("stale limit off by one", "sched.admission", "num_stale < limit", "num_stale <= limit"),
    Defect("lost generation is forgotten", "sched.state", "step.pending.appendleft(task.index)", "pass"),
    Defect(
        "lost score is forgotten", "sched.recovery", "state.unpop_unscored(state.ledger(task.step), task.index)", "pass"
    ),
    Defect("lost encoding is forgotten", "sched.recovery", "state.ledger(task.step).encoder = None", "pass"),
    Defect(
        "a lost evaluation still runs",
        "sched.results",
        "            self.state.num_evaluating -= 1",
        "            pass",
    ),
    Defect(
        "a lost start gives twice the quota", "sched.state", "num_stale -= task.stale", "num_stale -= 2 * task.stale"
    ),
    Defect(
        "running generations are not counted down",
        "sched.state",
        "        step.lost_versions[task.index] = task.version\n\n    def unpop",
        "        self.num_generating += 1\n        step.lost_versions[task.index] = task.version\n\n    def unpop",
    ),
    Defect("updates are not replayed", "sched.results", "            self.state.current.reopen()", "            pass"),
    Defect(
        "replay leaves micro-batches settled",
        "sched.state",
        "            self.settled.pop(index, None)\n",
        "            pass\n",
    ),
    Defect(
        "replay begins in the middle",
        "sched.state",
        "        self.taken = {}\n        self.num_updated = 0\n        self.next_index = 0\n",
        "        self.taken = {}\n        self.num_updated = 0\n",
    ),
    Defect(
        "the update in flight is not replayed",
        "sched.select",
        "step.taken[index] = advantages = step.ready.pop(index)",
        "advantages = step.ready.pop(index)",
    ),
    Defect(
        "a trainer's version is believed",
        "sched.recovery",
        "        if version == before:\n",
        "        if version <= before:\n",
    ),
    Defect("no rollback of open steps", "sched.state", "        self.steps.clear()\n", ""),
    Defect("SQ survives a rollback", "sched.state", "        self.scoring_queue.clear()\n", ""),
    Defect(
        "generators keep weights of the lost future",
        "sched.state",
        "if worker.version > version or (",
        "if False and (",
    ),
    Defect(
        "weights of the lost future are still published",
        "sched.state",
        "            self.publication = None\n        return payloads",
        "            pass\n        return payloads",
    ),
    Defect(
        "no publication after a rollback",
        "sched.recovery",
        "            num_discarded = self._results.roll_back(version)\n            state.recount_outdated()\n",
        "            num_discarded = self._results.roll_back(version)\n",
    ),
    Defect(
        "warm start is skipped",
        "sched.roster",
        "worker.lost, worker.version, worker.joined = False, version, now",
        "worker.lost, worker.joined, worker.version = False, now, max(version, worker.version)",
    ),
    Defect("checksums are not compared", "sched.sync", "        if got != wanted:", "        if False:"),
    Defect(
        "a load that failed reads for ever",
        "sched.results",
        "            self._sync.load_failed(*task.argument)",
        "            pass",
    ),
    Defect(
        "the dead get work", "sched.state", "return self.task is not None or self.lost", "return self.task is not None"
    ),
    Defect(
        "a reserved assist is forgotten",
        "sched.recovery",
        "                state.undispatch(state.ledger(argument.step), argument)",
        "                pass",
    ),
    Defect("a checkpoint that was due is forgotten", "sched.results", "        self._saved_version = NO_VERSION\n", ""),
    Defect(
        "a checkpoint that was lost has no successor",
        "sched.results",
        "(owed and self._owed_version is not None)",
        "False",
    ),
    Defect("the trainer stays switched", "sched.recovery", "state.switched = state.bubble_asked", "state.bubble_asked"),
    Defect(
        "without generators the trainer works alone",
        "sched.state",
        'not self.generators and not self._expects("generator")',
        "not self.generators",
    ),
    Defect(
        "without scorers generators score",
        "sched.state",
        'bool(self.scorers) or self._expects("scorer")',
        "bool(self.scorers)",
    ),
    Defect(
        "poison is tried for ever",
        "sched.recovery",
        "if len(failed) >= (1 if self._is_suspect(task) else self._rules.max_attempts):",
        "if False:",
    ),
    Defect(
        "poison comes back with a rollback",
        "sched.recovery",
        "        self._quarantined.append((replace(task, argument=()), error))",
        "        pass",
    ),
    Defect("the budget is never used up", "sched.recovery", "        recent.append(now)\n", ""),
    Defect("hung workers are not killed in time", "sched.loop", "if lane.killable else None", "if False else None"),
    Defect(
        "a restart uses another seed",
        "workers.faulty",
        '*micro_batch.seeds("initial-noise")',
        'life.number, *micro_batch.seeds("initial-noise")',
    ),
    Defect(
        "a rollback keeps metrics",
        "sched.results",
        "        self._trained = []\n        self._groups.clear()\n",
        "        self._groups.clear()\n",
    ),
    Defect("a restart skips its back-off", "sched.recovery", ") if len(recent) > 1 else 0.0", ") if False else 0.0"),
    Defect("a back-off is not waited for", "sched.restart", "            if wait_s > 0:", "            if False:"),
    Defect(
        "all workers share one budget",
        "sched.recovery",
        "self._restarts.setdefault(worker,",
        "self._restarts.setdefault('',",
    ),
    Defect("who never finishes comes back for ever", "sched.recovery", "barren > rules.max_attempts", "False"),
    Defect(
        "the deadline of an answer that came goes off",
        "sched.lanes",
        "                finally:\n                    self._alarm.off()",
        "                finally:\n                    pass",
    ),
    Defect("a snapshot that is due is not taken", "sched.snapshots", "version % self._every", "version % 2"),
    Defect(
        "no snapshot is recalled", "sched.restart", "        if snapshot is not None and (", "        if False and ("
    ),
    Defect("a snapshot that cannot be recalled is kept", "sched.restart", "        self._snapshots.drop()\n", ""),
    Defect(
        "a restore that hangs is waited for for ever",
        "sched.restart",
        "        if self._killable:\n            self._alarm.set",
        "        if False:\n            self._alarm.set",
    ),
    Defect(
        "a restore that was given up goes on when its answer comes",
        "sched.restart",
        "            if self.coroutine.cancelling():",
        "            if False:",
    ),
    Defect(
        "a trainer that is back restores nothing",
        "sched.restart",
        'if self.worker.role == "trainer" and self.version != self._wanted:',
        "if False:",
    ),
    Defect(
        "the oldest checkpoint is restored",
        "checkpoint",
        "for path in reversed(self._line):",
        "for path in self._line:",
    ),
    Defect(
        "a broken checkpoint is restored",
        "checkpoint",
        "                return verify(path).version, str(path)",
        "                return _version(path), str(path)",
    ),
    Defect(
        "the run ends while a checkpoint is written",
        "sched.state",
        "self.publish_due or self.writing:",
        "self.publish_due:",
    ),
    Defect(
        "two checkpoints are written at once",
        "sched.state",
        "return self.writing and bool(self.trainer_program)",
        "return False and bool(self.trainer_program)",
    ),
    Defect(
        "a save that failed counts",
        "sched.loop",
        "            self._results.unsaved(task.version)\n"
        "            self._results.save_if_due(last=self._state.step >= self._state.last_step)",
        '            self._results.saved(task, "")',
    ),
    Defect(
        "a full disk goes unnoticed",
        "checkpoint",
        "            self._prune(state.version)\n        except OSError as error:\n"
        "            raise cannot_write(temporary, error) from error",
        "            self._prune(state.version)\n        except OSError:\n            pass",
    ),
    Defect(
        "a full disk is an OSError",
        "checkpoint",
        "            self._prune(state.version)\n        except OSError as error:\n"
        "            raise cannot_write(temporary, error) from error",
        "            self._prune(state.version)\n        except OSError:\n            raise",
    ),
    Defect(
        "files are not synced",
        "files",
        "        file.flush()\n        os.fsync(file.fileno())\n",
        "        file.flush()\n",
    ),
    Defect(
        "the folder of the checkpoints is not synced",
        "files",
        "    for each in made:\n        sync_folder(each.parent)\n",
        "",
    ),
    Defect("a checkpoint has its name before its files are safe", "checkpoint", "    sync_folder(temporary)\n", ""),
    Defect("a checkpoint's name is not synced", "checkpoint", "    sync_folder(final.parent)\n", ""),
    Defect(
        "the manifest comes after the name",
        "checkpoint",
        "    write_synced(temporary / _MANIFEST, json.dumps(digests, indent=1, sort_keys=True).encode())\n"
        "    sync_folder(temporary)\n"
        '    aside = final.parent / final.name.replace("-", "-0")  # of this version too: one of them always counts\n'
        "    if final.exists():  # the run reached the same step again\n"
        "        if aside.exists():  # a crash left it\n"
        "            shutil.rmtree(aside)\n"
        "        final.rename(aside)\n"
        "    temporary.rename(final)\n"
        "    sync_folder(final.parent)\n",
        '    aside = final.parent / final.name.replace("-", "-0")\n'
        "    if final.exists():\n"
        "        final.rename(aside)\n"
        "    temporary.rename(final)\n"
        "    sync_folder(final.parent)\n"
        "    write_synced(final / _MANIFEST, json.dumps(digests, indent=1, sort_keys=True).encode())\n",
    ),
    Defect(
        "the best checkpoints displace the newest",
        "checkpoint",
        "{*folders[-self._keep :], *self._best(folders)}",
        "{*(self._best(folders) or folders[-self._keep :])}",
    ),
    Defect(
        "the old checkpoints are deleted first",
        "checkpoint",
        "            _complete(temporary, final, files, state)\n            self._prune(state.version)\n",
        "            self._prune(state.version)\n            _complete(temporary, final, files, state)\n",
    ),
    Defect("no limit on memory", "sched.memory", "return self._largest is not None and", "return True or"),
    Defect(
        "what is being generated needs no memory",
        "sched.memory",
        "(num_generating + 1) * self._largest",
        "self._largest",
    ),
    Defect(
        "rollouts that are lost keep their memory",
        "sched.state",
        "        self.memory.let_go(rollout.payload.nbytes)\n",
        "",
    ),
    Defect(
        "steps that are forgotten keep their memory",
        "sched.state",
        "        for step in self.steps.values():\n            self.memory.let_go(step.num_bytes)\n",
        "",
    ),
    Defect(
        "metrics of a lost gradient are kept",
        "sched.results",
        "        self._trained = []\n        if self.state.step in",
        "        if self.state.step in",
    ),
)


def plant(defect: Defect) -> None:
    """Put a defect into this process."""
    module = importlib.import_module(f"digen.{defect.module}")
    source = inspect.getsource(module)
    if source.count(defect.good) != 1:
        raise SystemExit(
            f"{defect.name}: {defect.good!r} occurs {source.count(defect.good)} times in {module.__name__}"
        )
    _reload(module, source.replace(defect.good, defect.bad))


def _reload(module: ModuleType, source: str) -> None:
    """Give the classes and functions of a module that are in use other code."""
    fresh = ModuleType(module.__name__)
    fresh.__dict__.update(__name__=module.__name__, __file__=module.__file__, __package__=module.__package__)
    code = compile(source, str(module.__file__), "exec")
    sys.modules[module.__name__], before = fresh, module
    exec(code, fresh.__dict__)  # noqa: S102 - our own source, to see whether a mistake in it is found
    sys.modules[module.__name__] = before
    for name, value in vars(fresh).items():
        old = vars(before).get(name)
        if inspect.isclass(value) and value.__module__ == module.__name__ and inspect.isclass(old):
            for member, made in vars(value).items():
                if inspect.isfunction(made) or isinstance(made, property | staticmethod | classmethod):
                    setattr(old, member, made)
        elif inspect.isfunction(value) and inspect.isfunction(old) and value.__module__ == module.__name__:
            old.__code__ = value.__code__


def seeds_until_caught(defect: Defect, num_seeds: int) -> tuple[int, str]:
    """How many seeds it takes, and what gives it away; -1 if none of them does."""
    from experiments.faults import failure_of

    plant(defect)
    for seed in range(num_seeds):
        failure, _ = failure_of(seed)
        if failure:
            return seed + 1, failure.splitlines()[0]
    return -1, "not caught"


def run(index: int, num_seeds: int) -> tuple[int, str]:
    """For a process of its own."""
    return seeds_until_caught(DEFECTS[index], num_seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [index for index, defect in enumerate(DEFECTS) if options.only in defect.name]
    started, num_missed = time.monotonic(), 0
    print(f"{'defect':46}{'seeds':>6}  caught by")
    with ProcessPoolExecutor(options.processes, max_tasks_per_child=1) as pool:
        results = pool.map(run, chosen, [options.seeds] * len(chosen))
        for index, (seeds, how) in zip(chosen, results, strict=True):
            num_missed += seeds < 0
            print(f"{DEFECTS[index].name:46}{seeds:>6}  {how[:110]}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} defects caught in {time.monotonic() - started:.0f} s")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
