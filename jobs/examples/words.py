#!/usr/bin/env python3
"""The job kind `words`: counts the words of the texts it is given, with the standard library alone.

Reads its job from stdin, {"payload": {"top": N}, "files": [{"name", "path", "bytes"}]}. Writes
out/words.csv, every word and how often it comes, and to stdout one JSON object a line: how far it is,
and last the result, or an error that another try would not help. All else goes to stderr.

SIGTERM, by which a worker asks it to stop, ends it at once, by way of whatever `with` and `finally` it
is in. Without that it would be killed 5 s later.
"""

import csv
import json
import re
import signal
import sys
from collections import Counter

PROGRESS_EVERY_BYTES = 1_000_000


class Unusable(Exception):
    """What it was given cannot be used: to try again would not help."""


def say(**line):
    print(json.dumps(line), flush=True)  # flushed: nobody waits for the end to see how far it is


def stop(*_):
    raise SystemExit("stopped")  # to stderr, with exit code 1


def words_of(file, read):
    """The words of a file, in lower case; `read` is told how many bytes were read."""
    with open(file["path"], "rb") as lines:
        try:
            for number, line in enumerate(lines, 1):
                read(len(line))
                yield from re.findall(r"\w+", line.decode().lower())
        except UnicodeDecodeError:
            raise Unusable(f"{file['name']}: line {number} is not UTF-8") from None


def count(job):
    files = job["files"]
    if not files:
        raise Unusable("words takes at least one text file; this job has none")
    total = sum(file["bytes"] for file in files)
    done = told = 0

    def read(size):
        nonlocal done, told
        done += size
        if done - told >= PROGRESS_EVERY_BYTES:
            told = done
            say(stage="count", progress=done / max(done, total))

    say(stage="count", progress=0)
    counts = Counter()
    for file in files:
        counts.update(words_of(file, read))

    say(stage="write", progress=1)
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    with open("out/words.csv", "w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([("word", "count"), *by_count])
    top = dict(by_count[: job["payload"].get("top", 10)])
    return {"words": sum(counts.values()), "different": len(counts), "top": top}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        say(result=count(json.load(sys.stdin)))
    except Unusable as error:
        say(error=str(error), retry=False)
