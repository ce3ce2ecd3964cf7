"""Made-up machines, as /sys describes them."""

from pathlib import Path


def describe_cores(root: Path, cores: list[str], node: int = 0) -> None:
    """Files that say which processors are of one core, and of which node."""
    for core in cores:
        for id in core.split(","):
            (root / f"cpu{id}/topology").mkdir(parents=True)
            file = root / f"cpu{id}/topology/thread_siblings_list"
            file.write_text(core + "\n")
            (root / f"cpu{id}/node{node}").mkdir()
