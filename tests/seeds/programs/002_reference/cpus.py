"""CPUs: decimal cores, millicores, a whole number."""

import kubetorch as kt

# --- the example
half = kt.Compute(cpus="0.5")  # Half a core
same = kt.Compute(cpus="500m")  # Same as above
two = kt.Compute(cpus=2)  # 2 cores

# --- what is said of it
assert half.resources == {"requests": {"cpu": "0.5"}}
assert same.resources == {"requests": {"cpu": "500m"}}
# "Integer: 1, 2 (converted to string)"
assert two.resources == {"requests": {"cpu": "2"}}
