"""The artifact's format, and the safetensors that it is made from: parsers, planes, layouts."""
