"""Rendered Cloud Run services as values of Google's own API types; run by an interpreter that has google-cloud-run.

Standard input has documents of `render cloud-run` as a JSON list. The YAML is version 1 of the API, whose names differ
from those of version 2: they are mapped here. A field or a value that its types do not have ends this with an error.
"""

from __future__ import annotations

import json
import sys

from google.cloud import run_v2
from google.protobuf import json_format


def version_2(document):
    template = document["spec"]["template"]
    spec, annotations = template["spec"], template["metadata"]["annotations"]
    container = dict(spec["containers"][0])
    probes = {}
    for name in ("startupProbe", "livenessProbe"):
        probe = dict(container.pop(name))
        probes[name] = {"httpGet": probe.pop("httpGet"), **probe}
    environment = [
        {"name": each["name"], "value": each["value"]}
        if "value" in each
        else {
            "name": each["name"],
            "valueSource": {
                "secretKeyRef": {
                    "secret": each["valueFrom"]["secretKeyRef"]["name"],
                    "version": each["valueFrom"]["secretKeyRef"]["key"],
                }
            },
        }
        for each in container.pop("env")
    ]
    return {
        "labels": document["metadata"]["labels"],
        "ingress": "INGRESS_TRAFFIC_" + annotations.pop("run.googleapis.com/ingress", "all").upper(),
        "template": {
            "revision": template["metadata"].get("name", ""),
            "serviceAccount": spec["serviceAccountName"],
            "timeout": f"{spec['timeoutSeconds']}s",
            "maxInstanceRequestConcurrency": spec["containerConcurrency"],
            "scaling": {
                "minInstanceCount": int(annotations["autoscaling.knative.dev/minScale"]),
                "maxInstanceCount": int(annotations["autoscaling.knative.dev/maxScale"]),
            },
            "executionEnvironment": "EXECUTION_ENVIRONMENT_"
            + annotations["run.googleapis.com/execution-environment"].upper(),
            "containers": [
                {
                    **container,
                    **probes,
                    "env": environment,
                    "resources": {
                        **container["resources"],
                        "startupCpuBoost": annotations["run.googleapis.com/startup-cpu-boost"] == "true",
                        "cpuIdle": annotations["run.googleapis.com/cpu-throttling"] == "true",
                    },
                }
            ],
        },
        "traffic": [traffic(each) for each in document["spec"]["traffic"]],
    }


def traffic(each):
    if each.get("latestRevision"):
        return {"type": "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST", "percent": each["percent"]}
    return {
        "type": "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION",
        "revision": each["revisionName"],
        "percent": each["percent"],
        "tag": each["tag"],
    }


for document in json.load(sys.stdin):
    json_format.ParseDict(version_2(document), run_v2.Service.pb()(), ignore_unknown_fields=False)
