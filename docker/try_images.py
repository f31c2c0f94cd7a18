"""Trial of the images that scripts/images has built: size, user, health check, and the work of each.

``python3 docker/try_images.py ENGINE STORE service=600 …`` with the most megabytes of each; the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LIMIT_S = 180
BUILDAH = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}


class Engine:
    """The engine: docker, podman or buildah, with the differences between them."""

    def __init__(self, name: str, store: str) -> None:
        self.name = name
        self._command = [name, "--root", f"{store}/root", "--runroot", f"{store}/run"] if name == "buildah" else [name]
        self._environment = os.environ | (BUILDAH if name == "buildah" else {})

    def _output(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"images: {self.name} {' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def about(self, image: str) -> dict[str, Any]:
        """Return size in megabytes, user, health check and version of an image."""
        if self.name == "buildah":
            details = json.loads(self._output("inspect", "--type", "image", image))["Docker"]
            size = json.loads(self._output("images", "--json", image))[0]["size"]
            number, unit = size.split()
            mb = float(number) * {"KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]
        else:
            details = json.loads(self._output("inspect", image))[0]
            mb = details["Size"] / 1e6
        config = details.get("config") or details["Config"]
        version = (config.get("Labels") or {}).get("org.opencontainers.image.version", "")
        check = (config.get("Healthcheck") or {}).get("Test", [])[1:]
        return {"mb": mb, "user": config["User"], "check": check, "version": version}

    @contextmanager
    def container(self, image: str) -> Iterator[Callable[..., list[str]]]:
        """Yield a function that makes the command line for another command in a new container of the image."""
        if self.name == "buildah":
            name = self._output("from", image).strip()
            try:
                yield lambda *command, **variables: [
                    *self._command,
                    "run",
                    *(f"--env={key}={value}" for key, value in variables.items()),
                    name,
                    "--",
                    *command,
                ]
            finally:
                self._output("rm", name)
            return
        name = f"penstock-trial-{os.getpid()}-{image}"
        self._output("run", "-d", "--rm", "--network=host", "--name", name, "--entrypoint", "sleep", image, "infinity")
        try:
            yield lambda *command, **variables: [
                *self._command,
                "exec",
                *(f"--env={key}={value}" for key, value in variables.items()),
                name,
                *command,
            ]
        finally:
            self._output("kill", name)

    def popen(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command in a container, and return its process."""
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, env=self._environment, stdout=quiet, stderr=quiet, text=True)

    def run(self, command: Sequence[str]) -> str:
        """Return the output of a command in a container; end this script where the command fails."""
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"images: {' '.join(command[-6:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fetch(url: str, body: Any = None, key: str = "", **headers: str) -> Any:
    """Return the JSON that a service answers with, or its text."""
    request = urllib.request.Request(url, headers={"Content-Type": "application/json", **headers})
    if body is not None:
        request.data = json.dumps(body).encode()
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        text = answer.read()
        return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text


def until(what: str, process: subprocess.Popen[str], ready: Callable[[], Any]) -> Any:
    """Return the first true answer of ``ready``; end this script where the process ends or the time is over."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            if answer := ready():
                return answer
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    sys.exit(f"images: {what}: not within {LIMIT_S} s, or ended with {process.poll()}")


@contextmanager
def told_to_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a process, and stop it afterwards."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def refuse_open_door(url: str) -> None:
    """End this script where a service answers a request without a key."""
    try:
        fetch(f"{url}/v1/plans", {})
    except urllib.error.HTTPError as refused:
        if refused.code == 401:
            return
    sys.exit("images: the service does not ask for a key")


def try_service(engine: Engine, image: str, check: Sequence[str]) -> None:
    """Check that the service is healthy, makes a plan, and answers only with a key."""
    port = free_port()
    with engine.container(image) as inside:
        key = engine.run(inside("penstock", "keys", "create", "--name", "trial", "--scope", "solve", "--scope", "read"))
        key = next(word for word in key.split() if word.startswith("psk_"))
        began = time.monotonic()
        with told_to_end(engine.popen(inside("penstock", "serve", PENSTOCK_PORT=str(port)))) as process:
            url = f"http://127.0.0.1:{port}"
            until("the service is ready", process, lambda: fetch(f"{url}/readyz"))
            ready_s = time.monotonic() - began
            refuse_open_door(url)
            example = fetch(f"{url}/v1/examples", key=key)[0]["request"]
            job = fetch(f"{url}/v1/plans", example, key, Prefer="wait=120")
            assert job["state"] == "succeeded", job
            engine.run(inside(*[part.replace("8642", str(port)) for part in check]))
            seconds = time.monotonic() - began
            print(f"{image}: ready after {ready_s:.1f} s, a plan ({job['result']['status']}) after {seconds:.1f} s")


def try_worker(engine: Engine, image: str, check: Sequence[str]) -> None:
    """Check that a worker starts on an empty database, and is healthy."""
    port = str(free_port())
    with engine.container(image) as inside:
        worker = engine.popen(inside("penstock", "worker", PENSTOCK_METRICS_PORT=port))
        with told_to_end(worker):
            until("the worker tells metrics", worker, lambda: fetch(f"http://127.0.0.1:{port}/metrics"))
            engine.run(inside(*[part.replace("9642", port) for part in check]))
        print(f"{image}: works")


def try_agent(engine: Engine, image: str, check: Sequence[str]) -> None:
    """Check that the agent reaches a service of the service's image, and is healthy."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    loopback = {"PENSTOCK_HOST": "127.0.0.1", "PENSTOCK_PORT": str(port), "PENSTOCK_SECURITY": "off"}
    agent = ("penstock", "agent", "--server", url, "--name", "trial", "--cpu-devices", "2", "--job", "toy=toy:job")
    with engine.container("penstock-service") as of_service, engine.container(image) as inside:
        with told_to_end(engine.popen(of_service("penstock", "serve", **loopback))) as service:
            until("the service answers", service, lambda: fetch(f"{url}/healthz"))
            with told_to_end(engine.popen(inside(*agent))) as process:
                agents = until("the agent is known", process, lambda: fetch(f"{url}/v1/agents"))
                engine.run(inside(*check))
                print(f"{image}: known as {agents['items'][0]['id'] if 'items' in agents else agents[0]['id']}")
        output = engine.run(
            inside("python3", "-c", "import torch; print(torch.ones(2).sum().item(), torch.__version__)")
        )
        print(f"{image}: torch adds up to {output.strip()}")


TRIALS = {"service": try_service, "worker": try_worker, "agent": try_agent}


def main(engine_name: str, store: str, *targets: str) -> int:
    """Try each image; return 1 where one is too large."""
    engine, code = Engine(engine_name, store), 0
    for target, _, most_mb in (one.partition("=") for one in targets):
        image = f"penstock-{target}"
        about = engine.about(image)
        fits = about["mb"] <= float(most_mb)
        print(f"{image}: {about['mb']:.0f} MB of at most {most_mb}: {'ok' if fits else 'TOO LARGE'}")
        code = code if fits else 1
        assert about["user"] not in ("", "0", "root", "0:0"), f"{image} runs as {about['user']!r}"
        assert about["check"], f"{image} has no health check"
        assert about["version"], f"{image} does not say its version"
        TRIALS[target](engine, image, about["check"])
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
