"""Logs values by Accelerate's TensorBoard tracker, and reads event files as TensorBoard does.

    python trackers.py write CASES FOLDER
    python trackers.py read FOLDER

`write` makes a project in the folder for each case. `read` prints what is in a folder that either side has written: every event
without its time, what TensorBoard's own reader makes of the folder, and the files with hyperparameters. Reading what the Rust side
wrote is the task of this comparison.
"""

import json
import os
import pathlib
import re
import sys

import yaml
from google.protobuf.json_format import MessageToDict
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray


def write(cases, folder):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    for number, case in enumerate(json.loads(pathlib.Path(cases).read_text())):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=os.path.join(folder, str(number)))
        accelerator.init_trackers(case["project"], case["config"], {"tensorboard": case["init_kwargs"]})
        for log in case["logs"]:
            values = {name: float(value[6:]) if str(value).startswith("float:") else value for name, value in log["values"]}
            accelerator.log(values, step=log["step"], log_kwargs={"tensorboard": log["kwargs"]})
        accelerator.end_training()


def event(proto):
    found = MessageToDict(proto)
    if proto.wall_time > 1e9:
        del found["wallTime"]
    for value, shown in zip(proto.summary.value, found.get("summary", {}).get("value", [])):
        plugin = value.metadata.plugin_data
        if plugin.plugin_name == "hparams":
            shown["metadata"]["pluginData"]["content"] = MessageToDict(HParamsPluginData.FromString(plugin.content))
    return found


def read(folder):
    folder = pathlib.Path(folder)

    def name(path):
        # Folders that are named by the time are all alike.
        return re.sub(r"(?<=/)\d{10}\.\d+(?=/|$)", "TIME", "/" + str(path.relative_to(folder)))

    events, hparams = {}, {}
    for path in sorted(folder.rglob("*")):
        if "tfevents" in path.name:
            # The name ends with the number of the file in its process, and with the suffix.
            suffix = re.fullmatch(r"events\.out\.tfevents\.\d{10}\..*\.\d+\.\d+((?:\.[a-z]\w*)?)", path.name).group(1)
            found = [event(proto) for proto in LegacyEventFileLoader(str(path)).Load()]
            events.setdefault(name(path.parent) + suffix, []).append(found)
        elif path.is_file():
            hparams[name(path)] = yaml.safe_load(path.read_text())
    reader = EventMultiplexer().AddRunsFromDirectory(str(folder))
    reader.Reload()
    shown = {}
    for run, tags in reader.Runs().items():
        run_name = name(folder / run)
        scalars = {tag: [[point.step, repr(point.value)] for point in reader.Scalars(run, tag)] for tag in tags["scalars"]}
        tensors = {
            tag: [[point.step, repr(make_ndarray(point.tensor_proto).tolist())] for point in reader.Tensors(run, tag)]
            for tag in tags["tensors"]
            if not tag.startswith("_hparams_")
        }
        shown[run_name] = {"scalars": scalars, "tensors": tensors}
    return {"events": events, "hparams": hparams, "shown": shown}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", cases, folder]:
            write(cases, folder)
        case ["read", folder]:
            print(json.dumps(read(folder), sort_keys=True))
        case _:
            sys.exit(__doc__)
