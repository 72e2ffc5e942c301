# deltalab with its rules, studies and dashboard, for NVIDIA GPUs and for CPUs. docs/how-to/container.md says how it is used.
FROM python:3.11-slim

# Triton compiles its launcher with gcc. Kubernetes' operator of Ray looks at a node by wget.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev wget && rm -rf /var/lib/apt/lists/*

# Where torch comes from: https://download.pytorch.org/whl/cpu makes an image for CPUs that is gigabytes smaller.
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=postgres,s3,slurm
COPY . /src
RUN pip install --no-cache-dir torch==$(sed -n 's/^torch==//p' /src/constraints.txt) --index-url $TORCH_INDEX
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[$EXTRAS]" "ray[default]"

# The user is nobody in particular, so that files in a mounted folder need not belong to root.
ENV HOME=/lab USER=lab NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /lab
RUN chown 1000:1000 .
USER 1000:1000
RUN deltalab version && deltalab study plan quickstart

ENTRYPOINT ["deltalab"]
CMD ["--help"]
