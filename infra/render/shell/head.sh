#!/usr/bin/env bash
# Rendered by `teneral pool render {platform}` from {file}: change that file, not this one.
# Deploys {models} on {title}:
#
#   ./deploy.sh          check, apply, ready and call, one after the other
#   ./deploy.sh check    name what must exist before and does not; changes nothing
#   ./deploy.sh apply    apply the documents next to this script
#   ./deploy.sh ready    wait until instances are ready
#   ./deploy.sh call     send one request to each model
#   ./deploy.sh remove   remove what `apply` made
set -euo pipefail
