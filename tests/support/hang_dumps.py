"""Flight-recorder dumps of jobs that a test makes up, in the form in which PyTorch writes them."""

from __future__ import annotations

import json

LIBRARY = {"name": "wrapper", "filename": "/opt/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", "line": 81}


class Job:
    """The dumps of ``size`` ranks; groups are given as {name: ranks}, and "0" is that of all ranks."""

    def __init__(self, size, groups=(), version="2.10", backend="nccl"):
        self.groups = {"0": list(range(size)), **dict(groups)}
        self.entries = {rank: [] for rank in range(size)}
        self.numbers = {}
        self.version, self.backend = version, backend
        self.skew = dict.fromkeys(range(size), 0)

    def call(self, rank, name, line, *, group="0", sizes=((3,),), dtype="Float", done=True, **more):
        """One call of a rank at a line of train.py."""
        is_message = name.startswith(("send ", "recv "))
        key = rank, group, is_message
        self.numbers[key] = number = self.numbers.get(key, 0) + 1
        now = 1_000_000 * len(self.entries[rank]) + self.skew[rank] + more.pop("late_ns", 0)
        end = 1_000_000 * len(self.entries[rank]) + 900_000 + self.skew[rank]
        self.entries[rank].append({
            "record_id": len(self.entries[rank]), "pg_id": list(self.groups).index(group),
            "process_group": [group, "default_pg" if group == "0" else f"axis_{group[0]}"],
            "collective_seq_id": 0 if is_message else number, "p2p_seq_id": number if is_message else 0,
            "op_id": len(self.entries[rank]), "profiling_name": f"{self.backend}:{name}",
            "input_sizes": [list(size) for size in sizes], "input_dtypes": [dtype] * len(sizes),
            "output_sizes": [list(size) for size in sizes], "output_dtypes": [dtype] * len(sizes),
            "state": "completed" if done else "scheduled", "is_p2p": is_message, "retired": done, "timeout_ms": 600000,
            "time_created_ns": now, "time_discovered_started_ns": now if done else None,
            "time_discovered_completed_ns": end if done else None,
            "frames": [LIBRARY, {"name": "step", "filename": "/home/me/train.py", "line": line},
                       {"name": "main", "filename": "/home/me/train.py", "line": 900}], **more})

    def alike(self, name, line, *, ranks=None, done=True, **more):
        """The same call of all ranks, or of some."""
        for rank in self.entries if ranks is None else ranks:
            self.call(rank, name, line, done=done, **more)

    def dump(self, rank):
        config = {str(i): {"name": name, "desc": "default_pg" if name == "0" else f"axis_{name[0]}", "ranks": str(ranks)}
                  for i, (name, ranks) in enumerate(self.groups.items()) if rank in ranks}
        return {"version": self.version, "pg_config": config, "entries": self.entries[rank]}

    def write(self, folder, *, without=(), last=None):
        """Write the dumps, without those of some ranks, with only the ``last`` calls; the paths."""
        paths = []
        for rank in self.entries:
            if rank in without:
                continue
            dump = self.dump(rank)
            if last is not None:
                dump["entries"] = dump["entries"][-last:]
            paths.append(folder / f"trace_{rank}.json")
            paths[-1].write_text(json.dumps(dump), encoding="ascii")
        return paths
