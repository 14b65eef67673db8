"""Runs Accelerate's launcher for a list of command lines, each in a process of its own that is forked after the imports.

A process that begins with nothing takes seconds to import torch; a forked one takes none. Nothing of the launcher is
replaced but the answer to whether DeepSpeed is installed, and the name of a file that only launches over pdsh write.
"""

import argparse
import json
import os
import sys
import types
from pathlib import Path

import accelerate.commands.launch as launcher
import torch.distributed.run  # noqa: F401

# What importing has left behind would be there in a launcher that begins with nothing, too.
IMPORTED = dict(os.environ)


def pretend_deepspeed():
    runner = types.ModuleType("deepspeed.launcher.runner")
    runner.DEEPSPEED_ENVIRONMENT_NAME = os.devnull
    package = types.ModuleType("deepspeed")
    package.launcher = types.ModuleType("deepspeed.launcher")
    sys.modules.update({"deepspeed": package, "deepspeed.launcher": package.launcher, runner.__name__: runner})
    launcher.is_deepspeed_available = lambda: True


def start(arguments, environment, log):
    """Forks a process that launches, and returns its number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.clear()
        os.environ.update(IMPORTED | environment)
        launcher.launch_command(launcher.launch_command_parser().parse_args(arguments))
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, required=True)
    arguments = parser.parse_args()
    pretend_deepspeed()
    for case in json.loads(arguments.cases.read_text()):
        started = [start(words, case["environment"], case["log"]) for words in case["machines"]]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
        if any(codes):
            sys.exit(f"{case['machines']} ended with {codes}:\n{Path(case['log']).read_text()}")


if __name__ == "__main__":
    main()
