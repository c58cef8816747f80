"""Ray Serve: replicas that are light proxies, each over a `teneral serve` of its own (extra: ray).

app.py        applications for Ray's configuration: one a model, and the ingress in front of all
replica.py    the deployment: owns a server, puts it to sleep, streams its answers
server.py     the server as a child process; knows nothing of Ray
policy.py     how many replicas are wanted, by the pool's own policy
"""
