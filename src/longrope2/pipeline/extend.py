"""`longrope2 extend`: recipe → stages → ledger. Every step that is not done yet, in order; run it again to continue."""

import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from longrope2 import ledger
from longrope2.console import duration, say, warn
from longrope2.distributed import World, world
from longrope2.errors import LongRopeError, chosen
from longrope2.files import fingerprint, package_versions
from longrope2.ledger import STAGES, TRAINING, Ledger
from longrope2.models import describe
from longrope2.options import length_of
from longrope2.pipeline.recipe import Recipe, default_evaluations, read_recipe
from longrope2.pipeline.stages import Setting, Step, check_recipe, make_steps, plan_is_usable
from longrope2.report.gather import gather
from longrope2.report.summary import UNTRAINED, Summary, summarise
from longrope2.runfolder import differences

EARLIER = "earlier"
"""Where results go that other options have replaced."""


def extend(
    model: str | Path | None,
    output: str | Path,
    *,
    target_length: int | str | None = None,
    config: str | Path | None = None,
    stages: Sequence[str] = (),
    cache: str | Path | None = None,
    original_length: int | None = None,
    extend_again: bool = False,
    wandb: str | None = None,
) -> dict[str, Any]:
    """Take a model from its window to a longer one, into the folder `output`; returns what was measured.

    `config` is a recipe, a file or a name, which also names the model if `model` is None; `stages` are those to run,
    all if none is named, but for data and train where the recipe has no texts. What is done and unchanged is skipped,
    what was interrupted goes on.
    """
    extension = Extension(
        None if model is None else str(model),
        Path(output),
        config=config,
        stages=stages,
        cache=None if cache is None else Path(cache),
        wandb=wandb,
        target_length=None if target_length is None else length_of(target_length),
        original_length=original_length,
        extend_again=extend_again,
    )
    with world() as here:
        return extension.run(here).to_json()


@dataclass(frozen=True, kw_only=True)
class Extended:
    """What an extension has found so far."""

    folder: Path
    summary: Summary
    page: Path | None
    """Of the stage report, if that shows what there is now."""
    wrong: tuple[str, ...]
    """What an engine computes wrongly, a line each; empty as long as nothing was verified."""

    @classmethod
    def read(cls, folder: Path) -> "Extended":
        """From what every step has left, in this session or before."""
        data, page = gather(folder), folder / ledger.PAGE
        is_fresh = "report" in data.steps and data.steps["report"].is_done and page.exists()
        verified = data.verified if "verify" in data.steps and data.steps["verify"].is_done else None
        return cls(
            folder=folder,
            summary=summarise(data),
            page=page if is_fresh else None,
            wrong=tuple(verified.wrong) if verified else (),
        )

    def to_json(self) -> dict[str, Any]:
        """What was measured, as plain values."""
        page = None if self.page is None else str(self.page)
        return {**self.summary.to_json(), "report": page, "wrong": list(self.wrong)}

    @property
    def remarks(self) -> list[str]:
        """What people should know besides."""
        old = self.folder / ledger.PAGE
        found = []
        if self.page is None and old.exists():
            found.append(f"{old} was written before this; `longrope2 report {quote(str(self.folder))}` writes it again")
        return [*found, self.summary.note] if self.summary.note else found


class Extension:
    """An extension that has been checked and may start: nothing is loaded or written before `run`."""

    def __init__(
        self,
        model: str | None,
        folder: Path,
        *,
        config: str | Path | None,
        stages: Sequence[str],
        cache: Path | None,
        wandb: str | None = None,
        **given: Any,
    ) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """What people should know before it starts."""
        ledger.run_folder(folder, beside=config).refuse_foreign()
        recipe = read_recipe(config, model=model, note=self.notes.append, **given)
        info = describe(recipe.model, original_length=recipe.original_length)
        info.refuse_rescaled(extend_again=recipe.extend_again)
        if not recipe.evaluate:
            measured = default_evaluations(info.rope.original_length, recipe.target_length)
            recipe = replace(recipe, evaluate=measured)
        self.setting = Setting(folder=folder, recipe=recipe, info=info, cache=cache, wandb=wandb)
        self._wanted = chosen("stage", stages, STAGES) or self._all_stages(recipe)
        check_recipe(self.setting, self._wanted)
        # What earlier runs have done belongs to this one, too.
        done = [name for name, entry in Ledger(folder).steps.items() if entry.is_done]
        self._steps = make_steps(self.setting, {*self._wanted, *(name.partition("/")[0] for name in done)})
        self._inputs = self._all_inputs()
        self._require_needs()

    @property
    def steps(self) -> list[Step]:
        """Those of the stages asked for."""
        return [step for step in self._steps if step.stage in self._wanted]

    def _all_stages(self, recipe: Recipe) -> list[str]:
        """Those that the recipe has something for."""
        if "space" not in recipe.search and recipe.search.get("method") != "longrope":
            why = "the model is trained" if recipe.trains else "the model is not trained"
            self.notes.append(f"search: space {recipe.search_config().space}, since {why} (see docs/extend.md)")
        known = [stage for stage in STAGES if stage != "calibrate" or recipe.calibrate is not None]
        if recipe.trains:
            return known
        if any(stage in Ledger(self.folder).steps for stage in TRAINING):
            raise LongRopeError(
                f"{self.folder}: begun with texts to train on, and this recipe names no [[source]]",
                hint="give the recipe again (--config), or another folder",
            )
        self.notes.append(UNTRAINED)
        return [stage for stage in known if stage not in TRAINING]

    def _all_inputs(self) -> dict[str, dict[str, Any]]:
        """What decides the result of each step, the results it needs included."""
        identity = self.setting.identity
        found: dict[str, dict[str, Any]] = {}
        for step in self._steps:
            needed = {name: fingerprint(found[name]) for name in step.needs if name in found}
            found[step.name] = _plain({"model": identity, "options": dict(step.options), "needs": needed})
        return found

    def _require_needs(self) -> None:
        """Refuse steps whose needs were left out and are not there from before; a report shows what there is."""
        book, chosen_names = Ledger(self.folder), [step.name for step in self.steps]
        for step in self.steps:
            missing = [
                name
                for name in step.needs
                if name not in chosen_names
                and not (name in self._inputs and book.is_done(name, fingerprint(self._inputs[name])))
            ]
            if missing and step.name != "report":
                stages = list(dict.fromkeys(name.partition("/")[0] for name in missing))
                raise LongRopeError(
                    f"{step.name} needs {' and '.join(stages)}, not done yet with these options",
                    hint=f"run that, too: --stages {','.join([*stages, *self._wanted])}",
                )

    def reasons(self) -> dict[str, str]:
        """Why each step has to run; those that are done and unchanged are left out."""
        book = Ledger(self.folder)
        found: dict[str, str] = {}
        for step in self.steps:
            entry, inputs = book.steps.get(step.name), self._inputs[step.name]
            if entry is None:
                found[step.name] = "not done yet"
            elif entry.fingerprint != fingerprint(inputs):
                found[step.name] = _differences(entry.inputs, inputs)
            elif not entry.is_done:
                found[step.name] = "interrupted"
            elif damaged := book.damaged(step.name):
                found[step.name] = f"missing or changed: {', '.join(damaged)}"
        planned = any(step.name == "data" for step in self.steps) and "data" not in found
        # Reading tokens takes a second for each GB: only if a step will train on them.
        if planned and not plan_is_usable(self.setting, whole="train" in found):
            found["data"] = "its tokenised sources are no longer in the cache"
        return found

    def run(self, here: World) -> Extended:
        """Do what is not done."""
        with ledger.run_folder(self.folder if here.is_main else None).alone():
            if here.is_main:
                self._open_ledger()
            reasons = here.gather_all(self.reasons() if here.is_main else {})[0]
            for step in self.steps:
                if step.name in reasons:
                    self._do(step, reasons[step.name], here)
                elif here.is_main:
                    say(f"{step.name}: done before")
        return Extended.read(self.folder)

    def _open_ledger(self) -> None:
        """Write down what is about to be done, in place of a ledger that is damaged."""
        setting = self.setting
        if kept := ledger.keep_damaged(self.folder):
            warn(
                f"{self.folder / ledger.LEDGER} is damaged (kept as {kept.name}) and made again: "
                "each step runs again, and finds what it has done"
            )
        Ledger(self.folder).describe(
            model=setting.info.name,
            revision=setting.info.revision,
            original_length=setting.info.rope.original_length,
            target_length=setting.recipe.target_length,
            recipe=_plain(asdict(setting.recipe)),
            versions=package_versions("torch", "transformers"),
            planned=[step.name for step in self._steps],
            expected={name: fingerprint(inputs) for name, inputs in self._inputs.items()},
        )
        for note in self.notes:
            say(note)

    def _do(self, step: Step, reason: str, here: World) -> None:
        inputs = self._inputs[step.name]
        if here.is_main:
            _make_room(self.folder, step, inputs, reason)
            say(f"── {step.name}")
            Ledger(self.folder).start(step.name, inputs)
        started = time.monotonic()
        try:
            if here.is_main or step.together:
                self.setting.results[step.name] = step.work(here)
        except BaseException:
            if here.is_main:
                Ledger(self.folder).pause(step.name, time.monotonic() - started)
            raise
        gc.collect()  # the next model needs the memory of this one
        if here.is_main:
            outputs = {name: _digest(self.folder / name) for name in step.outputs}
            seconds = Ledger(self.folder).finish(step.name, outputs, time.monotonic() - started)
            say(f"{step.name}: done in {duration(seconds)}")
        here.gather_all(None)  # no process reads what is not written yet


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which inputs are others than before."""
    parts: list[str] = []
    for group in ("model", "options", "needs"):
        changed = differences(before.get(group, {}), now[group])
        if group == "needs":
            parts += [f"{', '.join(changed)} changed"] if changed else []
        else:
            parts += [_shortened(f"{name} {old} → {new}") for name, (old, new) in changed.items()]
    return "; ".join(parts)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def _make_room(folder: Path, step: Step, inputs: Mapping[str, Any], reason: str) -> None:
    """Set aside what other inputs gave, or what is damaged; an interrupted step keeps what it has."""
    entry, place = Ledger(folder).steps.get(step.name), folder / step.name
    if step.replaces:
        return
    if entry is None:
        # A ledger was lost, or files were changed by hand. Long steps decide themselves what they can resume.
        if not step.together and (aside := _set_aside(folder, place, step.name, fingerprint(inputs))):
            say(f"{step.name} runs again; what was there is kept in {aside}")
    elif entry.fingerprint != fingerprint(inputs):
        aside = _set_aside(folder, place, step.name, entry.fingerprint)
        kept = f"; the earlier result is kept in {aside}" if aside else ""
        warn(f"{step.name} runs again ({reason}){kept}")
    else:
        say(f"{step.name} goes on ({reason})")
        if entry.is_done:
            for name in Ledger(folder).damaged(step.name):
                _set_aside(folder, folder / name, name, entry.fingerprint)


def _set_aside(folder: Path, place: Path, name: str, made_from: str) -> Path | None:
    """Move a result out of the way without losing it."""
    if not place.exists():
        return None
    wanted = folder / EARLIER / f"{name.replace('/', '-')}-{made_from.removeprefix('sha256:')[:8]}"
    aside, number = wanted, 1
    while aside.exists():
        number += 1
        aside = wanted.with_name(f"{wanted.name}-{number}")
    aside.parent.mkdir(exist_ok=True)
    place.rename(aside)
    return aside


def _digest(path: Path) -> str:
    digest = ledger.output_digest(path)
    if digest is None:
        raise LongRopeError(
            f"{path}: removed as soon as it was made", hint="run the same command again: what is missing is made again"
        )
    return digest


def _plain(value: Any) -> Any:
    """As the ledger gives it back: tuples have become lists."""
    return json.loads(json.dumps(value))
