"""How the rivals of several ranks tell what they have measured."""

import json
import sys


def tell(report):
    """Prints a report in one write call, so that lines of two ranks do not mix."""
    sys.stdout.write("report=" + json.dumps(report) + "\n")
    sys.stdout.flush()
