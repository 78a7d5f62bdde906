"""Every file under infra/ is checked by the tool that reads it in production, or by its published schema."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import hcl2
import kubernetes_validate
import pytest
import yaml

from dcr_s3.cli.app import run
from dcr_s3.errors import BadInput
from dcr_s3.metrics import Metrics
from dcr_s3.reports import PullReport
from dcr_s3.testing.servers import EmbeddedS3

INFRA = Path(__file__).resolve().parents[2] / "infra"
SCRIPTS = Path(sys.executable).parent


@pytest.mark.parametrize("name", sorted(p.name for p in (INFRA / "systemd").glob("*@.*")))
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    for unit in (INFRA / "systemd").glob("*@.*"):
        # verify wants the program to exist, where this machine has it.
        text = unit.read_text().replace("/opt/dcr-s3/bin/dcr-s3", str(SCRIPTS / "dcr-s3"))
        (tmp_path / unit.name.replace("@", "@policy")).write_text(text)
    unit = tmp_path / name.replace("@", "@policy")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("path", sorted((INFRA / "kubernetes").glob("*.yaml")), ids=lambda p: p.name)
def test_kubernetes_takes_the_manifests(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, "1.33", strict=True)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.throttled.yaml"])
def test_compose_files_follow_the_specification(name: str) -> None:
    command = [SCRIPTS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", INFRA / "compose" / name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for service in yaml.safe_load((INFRA / "compose" / name).read_text())["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (INFRA / "compose" / source).exists(), volume


def test_the_shell_takes_its_script() -> None:
    subprocess.run(["sh", "-n", INFRA / "compose" / "setup.sh"], check=True)


def terraform_files() -> dict[str, dict[str, Any]]:
    return {p.name: hcl2.loads(p.read_text()) for p in sorted((INFRA / "terraform").glob("*.tf"))}


def test_terraform_files_parse_and_refer_to_what_exists() -> None:
    files = terraform_files()
    declared = {name.strip('"') for f in files.values() for v in f.get("variable", []) for name in v}
    text = "\n".join(p.read_text() for p in (INFRA / "terraform").glob("*.tf"))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared - {"tags"} | {"tags"}
    made = {
        f"{kind}.{name}".replace('"', "")
        for f in files.values()
        for resource in f.get("resource", [])
        for kind, names in resource.items()
        for name in names
    }
    assert set(re.findall(r"\b(aws_\w+\.\w+)\b", text)) <= made
    roles = {p.stem for p in (INFRA / "policies").glob("*.json")}
    assert {"sender", "receiver", "janitor", "operator"} <= roles


def test_terraform_formats_its_files() -> None:
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed; its files were parsed by python-hcl2 only")
    command = ["terraform", f"-chdir={INFRA / 'terraform'}", "fmt", "-check", "-diff"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_an_s3_server_takes_the_lifecycle(moto_server: EmbeddedS3) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=moto_server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="k",
        aws_secret_access_key="s",
    )
    client.create_bucket(Bucket="lifecycle")
    rules = json.loads((INFRA / "lifecycle" / "lifecycle.json").read_text().replace("PREFIX", "runs"))
    client.put_bucket_lifecycle_configuration(Bucket="lifecycle", LifecycleConfiguration=rules)
    stored = client.get_bucket_lifecycle_configuration(Bucket="lifecycle")["Rules"]
    assert [rule["ID"] for rule in stored] == [rule["ID"] for rule in rules["Rules"]]


def commands() -> list[tuple[str, list[str]]]:
    """Every dcr-s3 command line that a file under infra/ starts."""
    found = []
    for unit in (INFRA / "systemd").glob("*.service"):
        for line in re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.M):
            found.append((unit.name, shlex.split(line)[1:]))
    for path in (INFRA / "kubernetes").glob("*.yaml"):
        for args in re.findall(r"^ +args: \[(.*)\]$", path.read_text(), re.M):
            found.append((path.name, [a.strip().strip('"') for a in args.split(",")]))
    for line in (INFRA / "cron" / "dcr-s3").read_text().splitlines():
        if "dcr-s3 pull" in line:
            found.append(("cron", shlex.split(line.partition("dcr-s3 pull")[1] + line.partition("dcr-s3 pull")[2])[1:]))
    return [(name, args) for name, args in found if args[0] in ("pull", "follow", "fold", "snapshot", "gc")]


@pytest.mark.parametrize(("name", "args"), commands(), ids=lambda v: v if isinstance(v, str) else v[0])
def test_command_lines_are_understood(
    name: str, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end with "no run here", not with "wrong command line"."""
    changed = []
    for number, arg in enumerate(args):
        if number == 1:
            changed.append("memory://infra-test/nothing")
        elif number == 2 and not arg.startswith("-"):
            changed.append(str(tmp_path / "mirror"))
        elif arg.startswith("/"):
            changed.append(str(tmp_path / "file"))
        else:
            changed.append({"15": "0", "20": "0", "9477": "0"}.get(arg, arg))
    assert run(changed) == 12


def test_cron_line_has_five_times_a_user_and_a_command() -> None:
    lines = [
        line
        for line in (INFRA / "cron" / "dcr-s3").read_text().splitlines()
        if line and not line.startswith("#") and not re.match(r"\w+=", line)
    ]
    assert [line.split(maxsplit=6)[:6] for line in lines] == [["*"] * 5 + ["serving"]]
    assert all("%" not in line for line in lines)  # cron turns it into a line break


def known_metrics() -> set[str]:
    metrics = Metrics("s3://bucket/run", "receiver")
    report = PullReport(
        version=1, from_version=0, step=1, total_elements=1, dense_bytes=1, up_to_date=False,
        seconds={"total": 1.0, "apply": 0.5},
    )  # fmt: skip
    metrics.observe(report)
    metrics.fail(BadInput("x"))
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


@pytest.mark.parametrize("path", ["grafana/dcr_s3.json", "prometheus/alerts.yaml"])
def test_dashboards_and_alerts_use_metrics_that_exist(path: str) -> None:
    text = (INFRA / path).read_text()
    used = set(re.findall(r"\bdcr_s3_\w+", text))
    assert used
    assert used <= known_metrics()


def test_grafana_dashboard_is_whole() -> None:
    board = json.loads((INFRA / "grafana" / "dcr_s3.json").read_text())
    assert {v["name"] for v in board["templating"]["list"]} == {"datasource", "run"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])


def test_alerts_have_what_prometheus_wants() -> None:
    for group in yaml.safe_load((INFRA / "prometheus" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["expr"].count("(") == rule["expr"].count(")")
