"""Real parts: a Ray cluster, and servers that speak the protocols of S3 and Google. All are slow to start."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import numpy as np
import psutil
import pytest
from test_data_tokenise import content, damaged_folder, documents, make, parsed, rows_of, texts, write

from longrope2.data import tokenise as tokenise_module
from longrope2.data.inputs import find_sources
from longrope2.data.plan import plan_documents
from longrope2.data.storage import file_system
from longrope2.errors import DataError, LongRopeError

__all__ = ["texts"]  # a fixture
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


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
    assert sum(shard.skipped for shard in record.shards) == 9


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


def task_of(process):
    """A process that makes a shard, among those that this one has started."""
    for _ in range(1000):
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                if child.name().startswith("ray::write_shard"):
                    return child
        time.sleep(0.01)
    return pytest.fail("no task is at work")


def test_ray_survives_kills_of_workers_and_driver(tmp_path, texts, ray):
    source = write(tmp_path / "a.jsonl", texts * 20)
    make([source], tmp_path / "whole", shard_size=0.05, workers=1)
    address = ray.get_runtime_context().gcs_address
    output = tmp_path / "killed"
    job = started(command(source, output), RAY_ADDRESS=address)
    wait_for_shards(output, 3, job)
    task_of(psutil.Process()).kill()  # which Ray runs again
    wait_for_shards(output, len(list(output.glob("0*.json"))) + 3, job)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    assert set(content(output)) != set(content(tmp_path / "whole"))
    before = {path: path.stat().st_mtime_ns for path in output.glob("0*.json")}
    again = started(command(source, output), RAY_ADDRESS=address)
    _, error = again.communicate()
    assert again.returncode == 0, error
    assert "shards are there" in error
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is made twice
    assert content(output) == content(tmp_path / "whole")


def test_ray_goes_on_when_nodes_come_and_go(tmp_path, texts, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs longrope2[cluster]")
    source = write(tmp_path / "a.jsonl", texts * 20)
    make([source], tmp_path / "whole", shard_size=0.05, workers=1)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        raylet = psutil.Process(lost.all_processes["raylet"][0].process.pid)
        monkeypatch.chdir(tmp_path)  # nodes have another working directory
        job = started(command(source, "out"), RAY_ADDRESS=cluster.address)
        wait_for_shards(tmp_path / "out", 3, job)
        task = task_of(raylet)
        cluster.remove_node(lost, allow_graceful=False)
        task.wait(60)  # ends with its node
        before = set(content(tmp_path / "out"))
        cluster.add_node(num_cpus=2)
        _, error = job.communicate()
    finally:
        cluster.shutdown()
    assert job.returncode == 0, error
    assert before < set(content(tmp_path / "whole"))
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_node_without_the_package_is_reported(tmp_path, texts, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs longrope2[cluster]")
    source = write(tmp_path / "a.jsonl", texts[:5])
    (tmp_path / "node" / "longrope2").mkdir(parents=True)
    (tmp_path / "node" / "longrope2" / "__init__.py").write_text('raise ImportError("no longrope2 here")')
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "node"))
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        job = started(command(source, tmp_path / "out"), RAY_ADDRESS=cluster.address, PYTHONPATH=before)
        _, error = job.communicate()
    finally:
        cluster.shutdown()
    assert job.returncode == 2
    assert "error: a node of the cluster cannot run this package" in error
    assert "no longrope2 here" in error
    assert "Traceback" not in error


def test_ray_gives_up_a_shard_that_always_kills_its_process(tmp_path, texts, ray, monkeypatch):
    monkeypatch.setattr(tokenise_module, "RETRIES", 1)
    monkeypatch.setattr(tokenise_module, "write_shard", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(LongRopeError, match="shard 000000: its process has died 2 times"):
        make([write(tmp_path / "a.jsonl", texts[:5])], tmp_path / "out", engine="ray")


SERVERS = {
    "s3": ("moto_server", "-p"),
    "gs": ("gcp-storage-emulator", "start", "--in-memory", "--default-bucket", "bucket", "--port"),
}
ROOTS = {"s3": "s3://bucket", "gs": "gs://anonymous@bucket"}


@pytest.fixture(scope="module", params=SERVERS)
def store(request):
    """The address of a bucket of a server that speaks S3, or of one that speaks Google's protocol."""
    program, *options = SERVERS[request.param]
    # In an environment of their own: they need older packages than ours (see the Makefile).
    found = shutil.which(program) or shutil.which(program, path=str(ROOT / ".venv-stores" / "bin"))
    if found is None:
        pytest.skip(f"{program} is not installed (make test-all brings it)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([found, *options, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,
    }
    patch = pytest.MonkeyPatch()
    for name, value in settings.items():
        patch.setenv(name, value)
    for _ in range(300):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
            break
        except urllib.error.HTTPError:
            break  # it answers; the bucket of this one is there
        except OSError:
            time.sleep(0.1)
    yield ROOTS[request.param]
    patch.undo()
    server.terminate()
    server.wait()


def put(target, path):
    system, target = file_system(target)
    system.put_file(str(path), target)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_gives_the_same_shards_plan_and_rows(tmp_path, texts, store, workers):
    """Read from a store, written to it, planned there, and copied only as rows need them."""
    kinds = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d 50%#?.parquet", "e.txt"]
    for number, kind in enumerate(kinds):
        part = texts[number * 30 : number * 30 + 30]
        path = tmp_path / "in" / kind
        if kind == "e.txt":
            path.write_text(part[0])
        else:
            write(path, part)
        put(f"{store}/in{workers}/{kind}", path)
    local = make([f"in={tmp_path / 'in'}"], tmp_path / "local", shard_size=0.03, workers=1)
    remote = make([f"in={store}/in{workers}"], f"{store}/out{workers}", shard_size=0.03, workers=workers)
    assert [shard.digest for shard in local.shards] == [shard.digest for shard in remote.shards]
    assert [shard.lengths_digest for shard in local.shards] == [shard.lengths_digest for shard in remote.shards]
    # Again: nothing is missing.
    assert make([f"in={store}/in{workers}"], f"{store}/out{workers}", shard_size=0.03) == remote
    # A shard that is lost is made again.
    system, lost = file_system(f"{store}/out{workers}/000001.arrow")
    system.rm_file(lost)
    assert make([f"in={store}/in{workers}"], f"{store}/out{workers}", shard_size=0.03, workers=1) == remote
    options = {"target_length": 512, "cache": tmp_path / "cache"}
    one = plan_documents("tiny", tmp_path / "a", sources=parsed(tmp_path / "local"), **options)
    other = plan_documents("tiny", tmp_path / "b", sources=parsed(f"{store}/out{workers}"), **options)
    assert np.array_equal(one.spans, other.spans)
    for a, b in zip(rows_of(one, tmp_path / "cache"), rows_of(other, tmp_path / "cache"), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)


def test_folders_of_a_store_need_not_be_objects(texts, store):
    """Most are not: programs upload files, whose names have slashes."""
    server, name = os.environ["AWS_ENDPOINT_URL"], "plain/sub/a.jsonl"
    upload = f"upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}"
    address, method = (f"bucket/{name}", "PUT") if store.startswith("s3") else (upload, "POST")
    line = json.dumps({"text": texts[0]}).encode()
    headers = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(f"{server}/{address}", line, headers, method=method)).close()
    for pattern in ("plain", "plain/sub", "plain/*/*.jsonl", "plain/**/*.jsonl", "plain/s*/a.jsonl"):
        (source,) = find_sources([f"{store}/{pattern}"])
        assert [file.url for file in source.files] == [f"{store}/{name}"]


def test_damage_in_a_store_is_found(tmp_path, texts, store):
    put(f"{store}/d/a.jsonl", write(tmp_path / "a.jsonl", texts[:20]))
    record = make([f"{store}/d/a.jsonl"], f"{store}/dout", workers=1)
    size = record.shards[0].bytes
    (tmp_path / "x").write_bytes(b"x" * size)
    put(f"{store}/dout/000000.arrow", tmp_path / "x")
    with pytest.raises(DataError, match=r"000000.arrow: damaged"):
        documents(f"{store}/dout")
    with pytest.raises(DataError, match="no dataset there"):
        documents(f"{store}/nothing")
    with pytest.raises(DataError, match="no such file or folder"):
        make([f"{store}/none"], tmp_path / "out")


def test_the_record_of_a_store_names_no_machine(store, tmp_path, texts):
    put(f"{store}/n/a.jsonl", write(tmp_path / "a.jsonl", texts[:5]))
    record = make([f"{store}/n/a.jsonl"], tmp_path / "out", workers=1)
    assert "127.0.0.1" not in json.dumps(record.sealed())
