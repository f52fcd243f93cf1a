"""Real parts: a Ray cluster on this machine, and a server that speaks S3. Both are slow to start."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from test_data_tokenise import content, damaged_folder, documents, make, parsed, rows_of, texts, write

from longrope2.data.plan import plan_documents
from longrope2.data.storage import file_system
from longrope2.errors import DataError

__all__ = ["texts"]  # a fixture
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# A server in an environment of its own: it needs older packages than ours (see the Makefile).
MOTO = shutil.which("moto_server") or shutil.which("moto_server", path=str(ROOT / ".venv-s3" / "bin"))


@pytest.fixture(scope="module")
def ray():
    """A cluster of three processes for tasks."""
    ray = pytest.importorskip("ray", reason="needs longrope2[cluster]")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


def test_ray_gives_the_bytes_of_the_local_engine(tmp_path, texts, ray):
    for number, kind in enumerate(["books", "a.jsonl", "a.jsonl.zst", "a.parquet"]):
        write(tmp_path / "in" / kind, texts[number * 30 : number * 30 + 30])
    make([tmp_path / "in"], tmp_path / "local", shard_size=0.02, workers=1)
    for workers in (1, 3):
        make([tmp_path / "in"], tmp_path / f"ray{workers}", shard_size=0.02, engine="ray", workers=workers)
        assert content(tmp_path / f"ray{workers}") == content(tmp_path / "local")


def test_ray_reports_damage_as_the_local_engine_does(tmp_path, texts, ray):
    damaged_folder(tmp_path / "in", texts)
    with pytest.raises(DataError, match=r"a.jsonl, byte \d+"):
        make([tmp_path / "in"], tmp_path / "out", engine="ray")
    record = make([tmp_path / "in"], tmp_path / "out", engine="ray", damaged="skip")
    assert sum(len(shard.damaged) for shard in record.shards) == 7


def command(source, output, *options):
    arguments = ["data", "tokenise", str(source), "--model", "tiny", "-o", str(output), "--shard-size", "0.05"]
    return [sys.executable, "-m", "longrope2", *arguments, "--engine", "ray", *options]


def started(arguments, **environment):
    return subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **environment}
    )


def wait_for_shards(output, count, job):
    while len(list(output.glob("0*.json"))) < count:
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.01)


def kill_a_task():
    """Kill a process of our own cluster while it makes a shard."""
    for _ in range(1000):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith("ray::write_shard"):
                    process.kill()
                    return
        time.sleep(0.01)
    pytest.fail("no task is at work")


def test_ray_survives_kills_of_workers_and_driver(tmp_path, texts, ray):
    source = write(tmp_path / "a.jsonl", texts * 10)
    make([source], tmp_path / "whole", shard_size=0.05, workers=1)
    address = ray.get_runtime_context().gcs_address
    output = tmp_path / "killed"
    job = started(command(source, output), RAY_ADDRESS=address)
    wait_for_shards(output, 3, job)
    kill_a_task()  # which Ray runs again
    wait_for_shards(output, len(list(output.glob("0*.json"))) + 3, job)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    assert set(content(output)) != set(content(tmp_path / "whole"))
    again = started(command(source, output), RAY_ADDRESS=address)
    _, error = again.communicate()
    assert again.returncode == 0, error
    assert "shards are there" in error
    assert content(output) == content(tmp_path / "whole")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A bucket of a server that speaks S3."""
    if MOTO is None:
        pytest.skip("moto_server is not installed (make test-all brings it)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([MOTO, "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
            break
        except OSError:
            time.sleep(0.1)
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    patch = pytest.MonkeyPatch()
    for name, value in settings.items():
        patch.setenv(name, value)
    yield url
    patch.undo()
    server.terminate()
    server.wait()


def put(name, path):
    system, target = file_system(f"s3://bucket/{name}")
    system.put_file(str(path), target)


@pytest.mark.parametrize("workers", [1, 2])
def test_s3_gives_the_same_shards_plan_and_rows(tmp_path, texts, store, workers):
    """Read from a store, written to it, planned there, and copied only as rows need them."""
    kinds = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt"]
    for number, kind in enumerate(kinds):
        part = texts[number * 30 : number * 30 + 30]
        path = tmp_path / "in" / kind
        if kind == "e.txt":
            path.write_text(part[0])
        else:
            write(path, part)
        put(f"in{workers}/{kind}", path)
    local = make([f"in={tmp_path / 'in'}"], tmp_path / "local", shard_size=0.03, workers=1)
    remote = make([f"in=s3://bucket/in{workers}"], f"s3://bucket/out{workers}", shard_size=0.03, workers=workers)
    assert [shard.digest for shard in local.shards] == [shard.digest for shard in remote.shards]
    assert [shard.lengths_digest for shard in local.shards] == [shard.lengths_digest for shard in remote.shards]
    # Again: nothing is missing.
    assert make([f"in=s3://bucket/in{workers}"], f"s3://bucket/out{workers}", shard_size=0.03) == remote
    # A shard that is lost is made again.
    system, lost = file_system(f"s3://bucket/out{workers}/000001.arrow")
    system.rm_file(lost)
    assert make([f"in=s3://bucket/in{workers}"], f"s3://bucket/out{workers}", shard_size=0.03, workers=1) == remote
    options = {"target_length": 512, "cache": tmp_path / "cache"}
    one = plan_documents("tiny", tmp_path / "a", sources=parsed(tmp_path / "local"), **options)
    other = plan_documents("tiny", tmp_path / "b", sources=parsed(f"s3://bucket/out{workers}"), **options)
    assert np.array_equal(one.spans, other.spans)
    for a, b in zip(rows_of(one, tmp_path / "cache"), rows_of(other, tmp_path / "cache"), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)


def test_s3_damage_is_found(tmp_path, texts, store):
    put("d/a.jsonl", write(tmp_path / "a.jsonl", texts[:20]))
    record = make(["s3://bucket/d/a.jsonl"], "s3://bucket/dout", workers=1)
    size = record.shards[0].bytes
    (tmp_path / "x").write_bytes(b"x" * size)
    put("dout/000000.arrow", tmp_path / "x")
    with pytest.raises(DataError, match=r"000000.arrow: damaged"):
        documents("s3://bucket/dout")
    with pytest.raises(DataError, match="no dataset there"):
        documents("s3://bucket/nothing")
    with pytest.raises(DataError, match="no such file or folder"):
        make(["s3://bucket/none"], tmp_path / "out")


def test_the_record_of_a_store_names_no_machine(store, tmp_path, texts):
    put("n/a.jsonl", write(tmp_path / "a.jsonl", texts[:5]))
    record = make(["s3://bucket/n/a.jsonl"], tmp_path / "out", workers=1)
    assert "127.0.0.1" not in json.dumps(record.sealed())
