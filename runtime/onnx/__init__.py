"""ONNX models: packed in segments, run by ONNX Runtime while their weights arrive."""
