"""What an artifact is made of, and the safetensors that it comes from: parsers, planes, layouts."""
