"""Installation of other trainers' releases and of Ray, and checks of exports against their code.

``scripts/trainers`` says how to run it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(os.environ.get("PENSTOCK_TRAINERS") or ROOT / ".venv" / "trainers")
WRITTEN_FOR = {
    "megatron-core": ("0.16.1",),
    "megatron-bridge": ("0.3.1",),
    "torchtitan": ("0.2.2", "0.3.0"),
    "deepspeed": ("0.19.8",),
    "ray": ("2.60.0",),
    "common-expression-language": ("0.10.0",),
}
"""Releases that layouts are written for, of Ray that jobs are written for, and an evaluator of Kubernetes' rules."""
OTHERS = "PENSTOCK_TRAINER_RELEASES"
"""Variable that names other releases to the tests."""
NEEDED = {
    "deepspeed": ("hjson", "py-cpuinfo", "einops"),
    "common-expression-language": ("prompt-toolkit", "wcwidth"),
}
"""Packages that a trainer imports at once and Penstock's own environment lacks."""
TESTS = (
    "tests/layouts/referees/test_megatron_core.py",
    "tests/layouts/referees/test_megatron_legality.py",
    "tests/layouts/referees/test_megatron_flags.py",
    "tests/layouts/referees/test_torchtitan_split.py",
    "tests/layouts/referees/test_torchtitan_degrees.py",
    "tests/layouts/referees/test_torchtitan_models.py",
    "tests/layouts/test_torch_orders.py",
    "tests/layouts/referees/test_deepspeed_modules.py",
    "tests/manifests/test_ray_runs.py",
    "tests/manifests/test_manifest_limits.py",
    "tests/convert/test_torch_csv.py::test_torch_validates_and_lowers_what_is_exported",
    "tests/convert/test_torch_csv.py::test_pytorchs_runtime_loads_the_rows_of_replicas_and_of_what_recomputes",
    "tests/executor/run/test_torch_runtime.py",
)
NAMES = {
    "test_megatron_core": "megatron-core",
    "test_megatron_legality": "megatron-core",
    "test_megatron_flags": "megatron-core",
    "test_torchtitan_split": "torchtitan",
    "test_torchtitan_degrees": "torchtitan",
    "test_torchtitan_models": "torchtitan",
    "test_deepspeed_modules": "deepspeed",
    "test_ray_runs": "ray",
    "test_manifest_limits": "common-expression-language",
    "test_torch_orders": "torch",
    "test_torch_csv": "torch",
    "test_torch_runtime": "torch",
}


def chosen(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the releases of each trainer, as ``words`` name them. Ends the process for an unknown trainer."""
    chosen_releases = dict(WRITTEN_FOR)
    for word in words:
        name, _equals, releases = word.partition("=")
        if name not in WRITTEN_FOR or not releases:
            sys.exit(f"trainers: {word!r} is not NAME=RELEASE, of {', '.join(WRITTEN_FOR)}")
        chosen_releases[name] = tuple(releases.split(","))
    return chosen_releases


RELEASES = chosen(os.environ.get(OTHERS, "").split())


def install(name: str, release: str) -> None:
    """Put a release into its folder, if it is not there."""
    folder = INSTALLED / f"{name}-{release}"
    if folder.is_dir():
        return
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    command += ["--no-build-isolation"] if name == "deepspeed" else []
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    subprocess.run(
        [*command, "--target", str(new), f"{name}=={release}", *NEEDED.get(name, ())], check=True, env=environment
    )
    new.rename(folder)


def report(releases: dict[str, tuple[str, ...]]) -> int:
    """Run the checks and print their table; return the number of checks that did not pass."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tier", "everything", f"--junitxml={results}", *TESTS]
        others = " ".join(f"{name}={','.join(versions)}" for name, versions in releases.items())
        environment = os.environ | {OTHERS: others}
        subprocess.run(command, cwd=ROOT, check=False, env=environment, stdout=sys.stderr)
        cases = list(ElementTree.parse(results).iter("testcase"))
    rows = [row(case, releases) for case in cases]
    width = [max(len(each[i]) for each in rows) for i in range(2)]
    for release, check, result in rows:
        print(f"{release:<{width[0]}}  {check:<{width[1]}}  {result}")
    return sum(result != "ok" for _release, _check, result in rows)


def row(case: ElementTree.Element, releases: dict[str, tuple[str, ...]]) -> tuple[str, str, str]:
    """Return the release, the check in words, and its result."""
    name, _bracket, parameters = case.get("name", "").removesuffix("]").partition("[")
    trainer = NAMES[case.get("classname", "").rpartition(".")[2]]
    candidates = releases.get(trainer, (torch_release(),))
    first, _dash, others = parameters.partition("-")
    release = next((each for each in candidates if "." in first and each.startswith(first)), candidates[0])
    of = others if "." in first and release.startswith(first) else parameters
    check = name.removeprefix("test_").replace("_", " ") + (f" ({of})" if of else "")
    failed = [each for each in case if each.tag in ("failure", "error", "skipped")]
    return (
        f"{trainer} {release}",
        check,
        (failed[0].get("message") or failed[0].tag).splitlines()[0] if failed else "ok",
    )


def torch_release() -> str:
    """Return the installed release of torch."""
    from importlib.metadata import version

    return version("torch")


def main() -> None:
    """Run the command of ``scripts/trainers``."""
    only = "--install" in sys.argv[1:]
    releases = chosen([word for word in sys.argv[1:] if word != "--install"])
    for name, each in releases.items():
        for release in each:
            install(name, release)
    if not only:
        sys.exit(1 if report(releases) else 0)


if __name__ == "__main__":
    main()
