"""The recipes for clusters: files of their kind, whose commands this package and torchrun understand."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from longrope2.cli import cli
from longrope2.pipeline.recipe import read_recipe

FOLDER = Path(__file__).parents[1] / "recipes" / "cluster"
STUB = """
srun() { "$@"; }
scontrol() { printf 'first\\nsecond\\n'; }
sleep() { :; }
said() { printf '%s\\0' "$@"; printf '\\n'; }
torchrun() { said torchrun "$@"; }
longrope2() { said longrope2 "$@"; touch "$RUN/plan.jsonl"; }
"""
"""Commands that only say how they were called."""
CLUSTER = {
    "SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "8", "SLURM_JOB_ID": "1", "PET_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NUM_NODES": "8", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "1", "SKYPILOT_NODE_RANK": "0",
}  # fmt: skip


def scripts():
    kubernetes = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    sky = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    given = "".join(f"{name}={value}\n" for name, value in sky["envs"].items())
    return {
        "slurm": (FOLDER / "slurm.sh").read_text(),
        "kubernetes": kubernetes["spec"]["trainer"]["args"][0],
        "skypilot": given + sky["run"],
    }


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_every_command_of_a_script_is_understood(kind, tmp_path):
    script = re.sub(r"^(\s*)RUN=.*", rf"\1RUN={tmp_path}", scripts()[kind], flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", STUB + script], capture_output=True, text=True, env={**os.environ, **CLUSTER}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    stages = []
    for line in filter(None, done.stdout.split("\n")):
        program, *words = line.removesuffix("\0").split("\0")
        if program == "torchrun":
            given = get_args_parser().parse_args(words)
            assert given.module
            assert given.training_script == "longrope2"
            assert given.max_restarts > 0
            words = given.training_script_args
        command = cli
        names = []
        while words and words[0] in getattr(command, "commands", {}):
            names.append(words[0])
            command, words = command.commands[words[0]], words[1:]
        context = command.make_context(names[-1], list(words))  # raises where an option is wrong
        assert not context.args
        stages.append((program, " ".join(names), context.params))
    assert [stage[:2] for stage in stages] == [
        ("torchrun", "search"), ("longrope2", "data plan"), ("torchrun", "train"), ("torchrun", "evaluate")
    ]  # fmt: skip
    _, plan, train, evaluate = (stage[2] for stage in stages)
    # What a stage reads is what another has written, and the numbers are those of the recipe for one machine.
    assert train["plan"] == plan["output"]
    assert train["cache"] == plan["cache"]
    assert str(train["factors"].parent) == str(stages[0][2]["output"])
    assert evaluate["model"] == f"{train['output']}/model"
    recipe = read_recipe("llama3-8b-128k")
    assert {name: train[name] for name in recipe.train} == recipe.train


def test_slurm_starts_a_job_again():
    text = (FOLDER / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert "requeue" in options
    assert int(options["nodes"]) > 1
    assert options["ntasks-per-node"] == "1"


def test_the_manifest_is_a_job_of_kubeflow_trainer():
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (override,) = job["spec"]["podTemplateOverrides"]
    volumes = {volume["name"] for volume in override["spec"]["volumes"]}
    mounts = {mount["name"] for mount in override["spec"]["containers"][0]["volumeMounts"]}
    assert mounts == volumes
    assert "/shared" in trainer["args"][0]


def test_the_sky_file_has_what_a_task_needs():
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "file_mounts", "envs", "setup", "run"}
    assert task["num_nodes"] > 1
    mounts = tuple(task["file_mounts"])
    assert all(task["envs"][name].startswith(mounts) for name in ("DATASET", "RUN"))
    # `sky launch` knows no recovery.
    assert "job_recovery" in task["resources"]
    assert "`sky jobs launch recipes/cluster/skypilot.yaml`" in (FOLDER / "README.md").read_text()


def test_the_command_for_nodes_that_come_and_go_is_understood():
    """tests/faults/test_lost_nodes.py runs such commands."""
    (command,) = re.findall(
        r"=1 torchrun (.*?)\n```", (FOLDER / "README.md").read_text().replace("\\\n", ""), re.DOTALL
    )
    given = get_args_parser().parse_args(command.split())
    assert given.nnodes == "1:8"
    assert given.rdzv_backend == "c10d"
    assert given.training_script_args[0] == "search"


def test_the_page_has_the_numbers_of_the_script():
    spec = importlib.util.spec_from_file_location("paper_run", FOLDER / "paper_run.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (FOLDER.parents[1] / "docs" / "paper-run.md").read_text(encoding="utf-8")
    assert script.page(page) == page, "run python recipes/cluster/paper_run.py docs/paper-run.md"
