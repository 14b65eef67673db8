"""A rank that does nothing but say that it ran: the rival's half of the race `launch_noop`."""

import os

print(f"rank={os.environ['RANK']} world_size={os.environ['WORLD_SIZE']}", flush=True)
