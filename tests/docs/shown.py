"""Words of pages that need another form to run here: hosts, paths, placeholders, and work that is made smaller.

A page runs as it is written but for what is listed here. Costs are why something is smaller: all pages together have
to take about a minute of processor time. Each entry has to occur in a page (``test_every_command.py``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

Find = Callable[[str], Any]
"""Function that returns a fixture by its name."""

ELSEWHERE = {
    "scripts/demo": "tests/scripts/test_demo.py runs it",
    "scripts/setup": "it made what this runs in",
    "python3": "it makes what this runs in",
    "scripts/test": "it is what runs this",
    "scripts/images": "needs root, debootstrap and a network",
    "scripts/bench-papers": "benchmarks are no tests",
    "scripts/gpu-check": "needs a GPU; tests/scripts/test_gpu_check.py",
    "python": "benchmarks are no tests; the controller needs Kubernetes: tests/service/http/routes/test_placements.py",
    "source": "a shell's own",
    "docker": "needs an engine; tests/docker checks the files",
    "kubectl": "needs a cluster; tests/docker and tests/manifests check the files",
    "scontrol": "needs Slurm; tests/slurm",
    "sbatch": "needs Slurm; tests/slurm",
    "srun": "needs Slurm; tests/slurm",
    "torchrun": "tests/slurm/test_slurm.py starts it",
    "ray": "needs Ray; tests/manifests/test_ray.py",
    "nvidia-smi": "needs a GPU",
    "echo": "of a deployment's secret",
    "install": "needs root",
    "cp": "needs root",
    "useradd": "needs root",
    "systemctl": "needs systemd",
}
"""First words of lines that are read only, and why."""

MEASURED = "each process loads torch; your-model.md measures, on two devices"
TRAINED = "each rank loads torch; running.md trains the same plan"
ADDED = "penstock plan --example gpt2-small --cluster 1x4xV100"
HF = "transformers is slow to load; tests/executor/hugging_face traces smaller models"
ADDS = "tests/docs/test_adding_pages.py runs it with what the page adds"

NOT_RUN = {
    "penstock plan --example gpt2-small -t cluster.json -b 64 --effort quick --server http://planner:8642": (
        "the service that is here has no keys; tests/service/security has services with keys"
    ),
    "penstock profile --hf config.json --traced --sequence-length 4096 --kind H100 --tensor 1,2,4,8 -o llama.json": (
        "transformers is slow to load; tests/cli/measure traces a smaller model"
    ),
    "penstock profile --hf config.json --traced --sequence-length 4096 --kind H100 --context 2,4 -o long.json": HF,
    "penstock profile --hf mixtral.json --traced --kind H100 --tensor 1,2 --expert 4,8 -o mixtral.json": HF,
    "penstock rank job.json --job mytrain:job --steps 1000 --report report.json": "a launcher starts it: tests/slurm",
    "penstock run plan.json --job mytrain:job --device cuda --check": "needs a GPU; tests/executor",
    "penstock profile --job mymodel:job --device cpu -o profile.json": MEASURED,
    "penstock profile --job mytrain:job --micro-batch-size 4 --concurrency 2 -o profile.json": MEASURED,
    "penstock run plan.json --job mytrain:job --steps 20 --check": TRAINED,
    "penstock run plan.json --job mymodel:job --check": TRAINED,
    "penstock run plan.json --job mytrain:job --steps 20 --trace trace.json --chrome-trace both.json": TRAINED,
    "penstock run plan.json --job mytrain:job --steps 2 --measure-memory": "tests/executor/profiling",
    "penstock tune plan.json --job mytrain:job --batches 3 -o tuned.json": "your-model.md has it, on fewer samples",
    "penstock import layout train.sh --from megatron --example llama-3-8b --cluster 2x8xH100": "trainers.md has it",
    f"{ADDED} -b 32 --micro-batch-size 2 --tensor 1 --schedule two-more -o two-more.json": ADDS,
    "penstock verify two-more.json": ADDS,
    "penstock simulate two-more.json --chrome-trace two-more-trace.json": ADDS,
    "penstock export two-more.json --to bundle -o two-more-job.json": ADDS,
    f"{ADDED} -b 16 --micro-batch-size 4 --tensor 1 --planner equal --set stages=4 -o equal.json": ADDS,
    f"{ADDED} -b 16 --micro-batch-size 4 --tensor 1 --planner equal --schedule gpipe -o equal.json": ADDS,
    "penstock verify equal.json": ADDS,
    "penstock schema legal-answer": "tests/docs/test_adding_a_question.py runs it with what the page adds",
}
"""Commands of ours that are only parsed, and why."""

STAY = ("penstock serve", "penstock worker", "penstock agent", "penstock probe --serve")
"""Commands that run until they are interrupted: ``conftest.py`` starts each once, and each line is parsed in full."""

HOSTS = ("http://planner:8642", "http://127.0.0.1:8642")
"""A service that is there."""

HERE: dict[str, str | Callable[[Find, str], str]] = {
    "10.0.0.1:8745": lambda find, line: find("peers")[0],
    "10.0.0.2:8745": lambda find, line: find("peers")[1],
    "scheduler:8786": lambda find, line: find("dask"),
    "c.json": "c.yaml",
    "/var/lib/penstock/penstock.sqlite": "penstock.sqlite",
    "/srv/training": ".",
    "/backups/": "",
    "/shared/gpt": "saved",
    ', key="psk_…"': "",
    "plan.json --cuts 12,24,36": "large.json --cuts 12,24,36",
    "plan … --planner avgpipe": "plan -p p.json -t cluster.yaml -b 256 --planner avgpipe",
    "restore FILE": "restore before-upgrade.backup",
    " RUN ": lambda find, line: f" {find('runs')(line.split()[2])} ",
    " JOB ": lambda find, line: f" {find('jobs')(line.split()[2])} ",
    "3f0c…": lambda find, line: key(),
    " KEY": lambda find, line: f" {key()}",
}
"""Words of a line, and what stands for them here."""


def key() -> str:
    """Return the id of the newest key in the local database."""
    with sqlite3.connect("penstock.sqlite") as database:
        key_id: str = database.execute("select id from api_keys order by rowid desc").fetchone()[0]
    return key_id


SMALLER = {
    "penstock plan --example llama-3-8b -t cluster.json -b 96": "{} --planner even",
    "plan --example llama-3-70b --framework megatron --cluster 8x8xH100": "{} --planner even",
    "plan --example llama-3-8b --cluster 1x8xH100": "{} --planner even",
    "-b 64 --target megatron --tensor 2,4": "{} --planner uniform",
    "penstock plan --hf config.json --cluster 8x8xH100 -b 64": "{} --planner even",
    "plan --example llama-3-70b --cluster 8x8xH100 --global-batch-size 64 -o plan.json": (
        "plan --example gpt2-small --cluster 2x8xH100 --global-batch-size 64 --planner gpipe -o plan.json"
    ),
    "penstock plan --example bert-48 --cluster dapple-config-a --global-batch-size 64": "{} --planner dapple",
    "penstock compare --example bert-48 --cluster dapple-config-a --global-batch-size 64": "{} --planner gpipe",
    "penstock compare --example gpt2-small --cluster 2x4xV100 -b 64 --update-rule all": "{} --planner wpipe",
    "penstock plan --example gpt2-small --cluster 2x4xV100 -b 64": "{} --planner gpipe",
    "penstock plan --example gpt2-small --cluster 2x4xV100 --global-batch-size 64": "{} --planner gpipe",
    "penstock sweep --example gpt2-small --cluster 1x8xV100 --cluster 2x8xV100 -b 64 -b 128": (
        "penstock sweep --example gpt2-small --cluster 1x8xV100 --cluster 2x8xV100 -b 64 --planner gpipe"
    ),
    "--max-plans 20 -o today.json --best best.json": "--alone -o today.json",
    "plan --example gpt2-xl --cluster 1x4xV100 --global-batch-size 32": (
        "plan --example gpt2-small --cluster 1x4xV100 -b 16 --micro-batch-size 4 --max-plans 5"
    ),
    "-b 64 --target megatron --max-plans 10": "-b 16 --micro-batch-size 4 --target megatron --max-plans 5",
    "penstock place --example gpt2-small --cluster 4x4xV100 -b 64": "{} --planner gpipe",
    "--global-batch-size 256": "{} --planner gpipe",
    " --planner auto": "",
    "-b 64 --planner avgpipe --update-rule elastic_averaging": "-b 1 --planner avgpipe --update-rule elastic_averaging",
    "--batches 3 --max-pipelines 2": "--batches 1 --max-pipelines 1",
    "-b 256 --nodes-from": "-b 256 --planner dapple --nodes-from",
    "--steps 500": "--steps 4",
    "--steps 1000": "--steps 6",
    "--steps 20": "--steps 4",
    "--checkpoint-every 50": "--checkpoint-every 2",
    "--micro-batch-size 2 --micro-batch-size 4 --concurrency 2": "--micro-batch-size 4 --concurrency 2",
    "--precision bf16 --post": "--precision bf16 --micro-batch-size 4 --post",
    "penstock profile --job": "penstock profile --measure-for 0.1 --job",
    "penstock profile --pipeline plan.json --batches 20": "penstock profile --pipeline plan.json --batches 2",
    "penstock probe": "penstock probe --measure-for 0.1",
}
"""The beginning or a word of a line, and the same with less to do; ``{}`` is what was found."""

CODES: dict[str, tuple[int, ...]] = {}
"""Exit codes of commands for which the page promises another code than 0."""

PYTHON_ELSEWHERE = {
    'penstock.plan("bert-48", "dapple-config-a"': "tests/test_readme.py runs it",
    "deepspeed": "needs DeepSpeed; tests/layouts",
    "import planned": "needs torchtitan; tests/layouts",
    "def read_racks": "tests/importers/cluster/test_importing_page.py runs it",
}
"""Words of snippets that are not run here, and why."""

PYTHON_SMALLER = {"steps=10_000": "steps=4", 'nodes={"max": 2},': "{} planner='gpipe',"}
"""Words of a snippet, and the same with less to do."""
