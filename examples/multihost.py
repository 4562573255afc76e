"""Trains the language model in several processes, as on several hosts, with quantized all-gathers of the weights.

    pip install ".[examples]"
    python examples/multihost.py
    python examples/multihost.py --processes 4 --recipe row_scaled
    python examples/multihost.py --gpus

Starts the processes on this machine: on CPUs with four virtual devices each, which talk by Gloo, or one for each GPU,
which talk by NCCL. On several hosts every host runs the last lines of ``work`` with the address of the first one. All
devices are one mesh with weights split over all of them. The processes print the same losses and the same digest
of the quantized weights; one process with as many devices prints that digest too.
"""

import argparse
import os
import socket
import subprocess
import sys
from dataclasses import replace

DEVICES = 4  # of a process, on CPUs


def work(process: int, processes: int, coordinator: str, gpus: bool, recipe: str, steps: int) -> None:
    """Trains, as one of the processes."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(process)
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f" --xla_force_host_platform_device_count={DEVICES}"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flag
    import jax

    if not gpus:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process)

    from lm import sharded
    from lm.data import stdlib_text
    from lm.recipes import RECIPES

    config = replace(sharded.SIZES["cpu"], steps=steps)
    mesh = sharded.make_mesh((1, len(jax.devices()), 1))
    run = sharded.train(RECIPES[recipe](), config, mesh, stdlib_text()[0])
    print(f"process {process} of {processes}, {len(jax.local_devices())} of {len(jax.devices())} devices", flush=True)
    print(sharded.report("NVFP4", run), flush=True)
    jax.distributed.shutdown()  # waits for the others, which need the first process until they end


def start(processes: int, arguments: list[str]) -> int:
    """Starts the processes and waits for them; returns the first exit status that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    common = [sys.executable, __file__, *arguments, "--processes", str(processes), "--coordinator", coordinator]
    started = [subprocess.Popen([*common, "--process", str(i)]) for i in range(processes)]
    statuses = [process.wait() for process in started]
    return next((status for status in statuses if status), 0)


def gpu_count() -> int:
    """Counts the GPUs by their driver, since a process that asks JAX would take their memory."""
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, help="how many; 2 on CPUs, or one for each GPU")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each process")
    parser.add_argument("--recipe", default="pretrain", help="one of those of train_lm.py")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--coordinator", help="address of the first process; given to those that this script starts")
    parser.add_argument("--process", type=int, help="number of the process, from 0")
    args = parser.parse_args()
    if args.process is not None:
        work(args.process, args.processes, args.coordinator, args.gpus, args.recipe, args.steps)
        return
    processes = args.processes or (gpu_count() if args.gpus else 2)
    arguments = ["--recipe", args.recipe, "--steps", str(args.steps)] + ["--gpus"] * args.gpus
    sys.exit(start(processes, arguments))


if __name__ == "__main__":
    main()
