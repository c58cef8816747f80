"""Ray Serve: replicas that are light proxies, each over a `teneral serve` of its own (extra: ray).

app.py        applications for Ray's configuration: one a model, and the ingress in front of all
replica.py    the deployment, and its server as a child process: puts it to sleep, streams its answers
policy.py     how many replicas are wanted, by the pool's own policy
"""
