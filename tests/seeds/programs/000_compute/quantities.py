"""The notes on units: every form of CPUs, memory, disk and GPUs that they list."""

import kubetorch as kt

for cpus in ("0.5", "1.0", "2.0", "500m", "1000m", "2000m"):
    assert kt.Compute(cpus=cpus).resources["requests"] == {"cpu": cpus}

for size in ("1000000", "1Ki", "1Mi", "1Gi", "1Ti", "1K", "1M", "1G", "1T"):
    expected_size = size.replace("K", "k") if size == "1K" else size  # Kubernetes has it in small
    assert kt.Compute(memory=size).memory == expected_size
    assert kt.Compute(disk_size=size).resources["requests"] == {"ephemeral-storage": expected_size}

for gpus in ("1", "2"):
    assert kt.Compute(gpus=gpus).resources["limits"] == {"nvidia.com/gpu": gpus}
assert kt.Compute(gpu_memory="16Gi").gpu_memory == "16Gi"

# "Memory/disk values are case sensitive (Mi != mi)"
try:
    kt.Compute(memory="1mi")
except kt.SpecError as error:
    assert "memory is '1mi'" in str(error), error
else:
    raise AssertionError("1mi is no size")

# "Fractional GPUs not currently supported."
try:
    kt.Compute(gpus="0.5")
except kt.SpecError as error:
    assert "gpus is '0.5'" in str(error), error
else:
    raise AssertionError("half a GPU was taken")
