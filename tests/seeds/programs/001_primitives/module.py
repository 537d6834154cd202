"""A function as a service."""

import kubetorch as kt

compute = kt.Compute(cpus="0.1")
data = [1.0, 2.0, 3.0]


# --- the example
def train(data, epochs):
    # Your training code
    # --- what is said of it
    model = {"mean": sum(data) / len(data), "epochs": epochs}
    # --- the example
    return model


# Wrap the function
remote_train = kt.fn(train)
# Deploy to compute - creates K8s Service
remote_train = remote_train.to(compute)
# Call it - makes HTTP request to the service
model = remote_train(data, epochs=10)

# --- what is said of it
assert model == {"mean": 2.0, "epochs": 10}
remote_train.teardown()
