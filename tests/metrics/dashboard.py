#!/usr/bin/env python3
"""Evaluates each expression of docs/grafana.json in Prometheus, which scrapes the example `metrics`. None may be empty.

dashboard.py EXAMPLE [PNG]   EXAMPLE: the example's binary; PNG: also plots the measurements there, with matplotlib
"""

import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# long enough for several outages: the example has one about every 10 s
SCRAPED_FOR = 40
INTERVAL = "15s"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(port, path, **query):
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def expressions():
    """Yields the title, legend and expression of each line, as Grafana sends it with all kinds and classes selected."""
    for panel in json.loads((ROOT / "docs/grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", INTERVAL)
            text = re.sub(r"\$(kind|class)", ".*", text)
            yield panel["title"], target["legendFormat"], text


def draw(port, start, png):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    panels = {}
    for title, legend, text in expressions():
        panels.setdefault(title, []).append((legend, text))
    figure, axes = plot.subplots(4, 3, figsize=(15, 12), layout="constrained")
    for axis, (title, lines) in zip(axes.flat, panels.items()):
        for legend, text in lines:
            for series in ask(port, "query_range", query=text, start=start, end=time.time(), step=1):
                label = re.sub(r"{{(\w+)}}", lambda name: series["metric"].get(name[1], ""), legend)
                points = [(float(at) - start, float(value)) for at, value in series["values"]]
                axis.plot(*zip(*points), label=label)
        axis.set_title(title)
        axis.set_xlabel("s")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.savefig(png, dpi=70)


def main():
    example, png = sys.argv[1], sys.argv[2:]
    metrics, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s}\n"
            f"scrape_configs: [{{job_name: nestlock, static_configs: [{{targets: ['127.0.0.1:{metrics}']}}]}}]\n"
        )
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "METRICS_ADDR": f"127.0.0.1:{metrics}"}
        environment.pop("NESTLOCK_URL", None)
        started = []
        try:
            started.append(subprocess.Popen([example], env=environment, **quiet))
            listen = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder}/data"]
            started.append(subprocess.Popen(["prometheus", f"--config.file={config}", *listen], **quiet))
            start = time.time()
            time.sleep(SCRAPED_FOR)
            if any(process.poll() is not None for process in started):
                sys.exit("dashboard.py: the example or Prometheus exited too early")
            empty, count = [], 0
            for title, _, text in expressions():
                values = [float(series["value"][1]) for series in ask(port, "query", query=text)]
                count += 1
                if not any(map(math.isfinite, values)):
                    empty.append(f"{title}: {text}: {values}")
            if png:
                draw(port, start, png[0])
        finally:
            for process in started:
                process.terminate()
                process.wait()
    if empty:
        sys.exit("dashboard.py: expressions without data:\n" + "\n".join(empty))
    print(f"all {count} expressions of the dashboard have data")


main()
