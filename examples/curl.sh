#!/bin/sh
# Deploys a function with the CLI and calls it with curl.
set -eu
cd "$(dirname "$0")"

kt deploy hello_world.py:train --compute '{"cpus": "0.1"}'
kt port-forward train 18080 > /dev/null &
trap 'kill $!; kt teardown --yes train' EXIT

url=http://localhost:18080
token=$(kt token train --ttl 5m)

echo "a result:"
curl --silent --retry 9 --retry-connrefused "$url/train" \
  -H "Authorization: Bearer $token" \
  -d '{"args": [10], "kwargs": {"lr": 0.5}}'
echo

echo "an exception:"
curl --silent --show-error --write-out '\nstatus %{http_code}\n' "$url/train" \
  -H "Authorization: Bearer $token" \
  -d '{"args": [0]}' | sed 's/"traceback": *"\([^"\\]\|\\.\)*"/"traceback": …/'
