"""Writes `events.json`: records of event files, byte for byte as torch and TensorBoard write them, for tests of `crates/core`.

    python parity/tracking/generate.py

Needs torch and the packages of `requirements.txt` beside this file.
"""

import io
import json
import pathlib

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, scalar, text

WRITER = "tensorboard.summary.writer.event_file_writer"


def record(event):
    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString(deterministic=True))
    return file.getvalue().hex()


def of_summary(summary, wall_time, step):
    event = Event(wall_time=wall_time, summary=summary)
    if step is not None:
        event.step = step
    return record(event)


def main():
    scalars = [
        ("loss", 0.1, 3, False, False),
        ("loss", 0.1, 3, True, False),
        ("loss", 0.1, 3, True, True),
        ("a/b c", -2.5e30, 0, False, False),
        ("zero", 0.0, None, False, False),
        ("zero", 0.0, None, True, True),
        ("nan", float("nan"), 1, False, False),
        ("inf", float("inf"), 2**40, False, False),
        ("too large for float32", 1e300, 7, False, False),
        ("grün", 1, -1, False, False),
        ("long" * 60, 1, 300, False, False),
    ]
    texts = [("note", "some_value", 0), ("note", "", 5), ("grün", "héllo\nworld", None), ("long", "x" * 300, 2)]
    parameters = [
        {},
        {"lr": 0.01},
        {"b": True},
        {"none": None, "s": "some_value"},
        {"empty": "", "n": 12},
    ]
    wall_time = 1700000000.25
    start = [
        Event(wall_time=wall_time, step=5, file_version="brain.Event:2"),
        Event(wall_time=wall_time, step=5, session_log=SessionLog(status=SessionLog.START)),
    ]
    version = Event(wall_time=wall_time, file_version="brain.Event:2", source_metadata=SourceMetadata(writer=WRITER))
    cases = {
        "wall_time": wall_time,
        "file_version": record(version),
        "session_start": {"step": 5, "record": "".join(map(record, start))},
        "scalars": [
            {
                "tag": tag,
                # JSON has no number for these.
                "value": str(value),
                "step": step,
                "new_style": new_style,
                "double_precision": double,
                "record": of_summary(scalar(tag, value, new_style=new_style, double_precision=double), wall_time, step),
            }
            for tag, value, step, new_style, double in scalars
        ],
        "texts": [
            {"tag": tag, "text": value, "step": step, "record": of_summary(text(tag, value), wall_time, step)}
            for tag, value, step in texts
        ],
        "hparams": [
            {"values": values, "records": [of_summary(part, wall_time, None) for part in hparams(values, {})]}
            for values in parameters
        ],
    }
    path = pathlib.Path(__file__).parent / "events.json"
    path.write_text(json.dumps(cases, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
