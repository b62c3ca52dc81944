"""What the recipes in examples/ start, found out by running them with programs that only write down their
arguments."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LENGTHS = {"64K": 65536, "128K": 131072, "512K": 524288, "1M": 1048576}
# Where each launcher says that it runs: nodes.
LAUNCHERS = {"one_gpu.sh": 1, "one_node.sh": 1, "slurm.sbatch": 4, "kubernetes.yaml": 4}
# Conversions make the folder that they are asked for, as recipes wait for it.
WRITE_DOWN = """#!/bin/bash
printf "%q " "$@" >> "$COMMANDS"; echo >> "$COMMANDS"
while [ $# -gt 0 ]; do [ "$1" != --out ] || mkdir -p "$2"; shift; done
"""
STAND_INS = {
    **dict.fromkeys(("python", "python3", "torchrun"), WRITE_DOWN),
    "scontrol": "#!/bin/bash\nprintf 'first\\nsecond\\n'\n",
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
}


@dataclass(frozen=True)
class Training:
    """A call of pretrain_qwen.py: `launch` are torchrun's arguments, `flags` the script's."""

    launch: list[str]
    flags: list[str]

    @property
    def ranks(self) -> int:
        """Processes that torchrun starts in all."""
        return self.option("--nnodes", 1) * self.option("--nproc-per-node", 1)

    def option(self, name: str, default=None) -> int:
        """The whole number behind a flag."""
        words = [*self.launch, *self.flags]
        return int(words[words.index(name) + 1]) if name in words else default


def training(recipe: str, folder: Path, flags=(), **settings) -> Training:
    """The training that the recipe examples/`recipe` starts with these environment variables."""
    programs, log = folder / "programs", folder / "commands"
    if not programs.exists():
        programs.mkdir()
        for name, text in STAND_INS.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
    log.unlink(missing_ok=True)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "COMMANDS": log, **settings}
    command = ["bash", EXAMPLES / recipe]
    if recipe.endswith(".yaml"):
        command, more = container(EXAMPLES / recipe)
        environment = {**more, **environment}
    if recipe.endswith(".sbatch"):
        environment |= slurm(EXAMPLES / recipe)
    environment = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [*command, *flags], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (words,) = [line for line in map(shlex.split, log.read_text().splitlines()) if script_place(line)]
    place = script_place(words)
    return Training(words[: place - 1], words[place:])


def script_place(words: list[str]) -> int:
    """Number of words up to pretrain_qwen.py, itself included; 0 when it is not there."""
    places = [place for place, word in enumerate(words, 1) if word.endswith("pretrain_qwen.py")]
    return places[0] if places else 0


def slurm(path: Path) -> dict[str, str]:
    """What Slurm tells a job of the resources that its #SBATCH lines ask for."""
    asked = dict(re.findall(r"^#SBATCH --(\S+)=(\S+)$", path.read_text(), re.MULTILINE))
    assert asked["gpus-per-node"] == "8"
    assert asked["ntasks-per-node"] == "1"
    nodes = {"SLURM_JOB_NUM_NODES": asked["nodes"], "SLURM_JOB_NODELIST": "node[1-4]"}
    return {**nodes, "SLURM_SUBMIT_DIR": str(ROOT)}


def container(path: Path) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a PyTorchJob's first pod, with those that the operator adds."""
    replicas = yaml.safe_load(path.read_text())["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (pod,) = replicas["Master"]["template"]["spec"]["containers"]
    variables = {item["name"]: item["value"] for item in pod["env"]}
    assert pod["name"] == "pytorch"  # the one that the operator looks for
    assert str(pod["resources"]["limits"]["nvidia.com/gpu"]) == variables["GPUS"]
    assert sum(replica["replicas"] for replica in replicas.values()) == int(variables["NODES"])
    operator = {"MASTER_ADDR": "long-context-master-0", "MASTER_PORT": "23456"}
    return pod["command"], variables | operator | {"RANK": "0", "WORLD_SIZE": "4"}
