"""With [calibrate], the switch that was measured is that of all stages after it."""

import json
from dataclasses import replace

import pytest
from pipeline_samples import write_recipe

from longrope2 import ledger
from longrope2.calibration import calibrate as calibration
from longrope2.calibration.rule import recommend
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.pipeline.extend import Extended, Extension
from longrope2.pipeline.forecast import forecast
from longrope2.report.gather import gather
from longrope2.watching import look

ALONE = World(process=0, num_processes=1, local_process=0)
SWITCH = 192
STAGES = ("search", "calibrate", "data", "train", "evaluate", "export", "report")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrate")


@pytest.fixture(scope="module")
def plain(place):
    path = write_recipe(place)
    # Texts below the switch, and of every other length that could be called short.
    path.write_text(path.read_text().replace("cut = [200, 400]", "cut = [150, 250, 400]"))
    return path


@pytest.fixture(scope="module")
def recipe(plain):
    path = plain.with_name("calibrated.toml")
    path.write_text(plain.read_text() + "[calibrate]\ndocuments = 5\nlengths = [192, 256, 320]\n")
    return path


def job(place, recipe, folder, *stages):
    return Extension(None, folder, config=recipe, stages=stages, cache=place / "cache")


@pytest.fixture(scope="module")
def whole(place, recipe, one_thread):
    """A run in which the numbers say that the original RoPE should end early."""

    def early(points, window):
        return replace(recommend(points, window), switch_length=SWITCH)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "recommend", early)
        job(place, recipe, place / "run", *STAGES).run(ALONE)
    return place / "run"


def test_what_is_short_follows_the_switch_from_plan_to_export(whole):
    searched, used = (RescaleFactors.load(whole / name) for name in (ledger.FACTORS, ledger.CALIBRATED))
    assert (searched.original_length, used.original_length) == (256, SWITCH)
    assert used.long == searched.long
    header, *rows = map(json.loads, (whole / ledger.PLAN).read_text().splitlines())
    assert header["config"]["original_length"] == SWITCH
    assert [(bucket["above"], bucket["up_to"]) for bucket in header["config"]["buckets"]] == [
        (0, SWITCH), (SWITCH, 511), (511, 512),
    ]  # fmt: skip
    assert {row["kind"] for row in rows} == {"short", "long"}
    config = json.loads((whole / "export/tiny-512/config.json").read_text())
    assert config["original_max_position_embeddings"] == SWITCH
    assert config["max_position_embeddings"] == 512


def test_factors_alone_are_measured_with_the_switch_too(whole):
    """Within it they are the base; at the window, beyond the switch, they are not."""
    scores = gather(whole).scores
    base, searched = (
        next(score.score for score in scores[name] if score.suite == "perplexity")
        for name in (ledger.BASE, ledger.SEARCHED)
    )
    assert searched > 1.01 * base


def test_the_report_says_where_it_switches(whole):
    extended = Extended.read(whole)
    assert extended.page is not None
    page = extended.page.read_text()
    assert "tokens up to which it keeps the original RoPE, measured" in page
    assert f">{SWITCH}<" in page
    assert next(view.text for view in look(whole) if view.stage == "calibrate") == f"switch at {SWITCH} tokens"


def test_steps_that_are_done_stay_done_and_another_switch_undoes_them(place, plain, recipe, whole):
    assert job(place, recipe, whole, *STAGES).reasons() == {}
    without = job(place, plain, whole, *(stage for stage in STAGES if stage != "calibrate")).reasons()
    assert {"data", "train", "export", f"evaluate/{ledger.SEARCHED}/niah"} <= set(without)
    assert not {"search", "evaluate/yarn/niah"} & set(without)


def test_what_a_calibration_takes_is_forecast(place, recipe):
    steps = {step["step"]: step for step in forecast(job(place, recipe, place / "new"))["steps"]}
    assert steps["calibrate"]["seconds"] > 10
    assert steps["calibrate"]["note"].startswith("30 documents read")  # 5 under both RoPEs at three lengths


def test_without_the_table_there_is_no_such_stage(place, plain):
    assert "calibrate" not in {step.stage for step in job(place, plain, place / "new").steps}
    with pytest.raises(LongRopeError, match=r"calibrate: the recipe has no table \[calibrate\]"):
        job(place, plain, place / "new", "search", "calibrate")
