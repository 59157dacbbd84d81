"""Runs in an environment of SageMaker's SDK 2: what it makes of estimators, without AWS.

Reads a JSON list of [class, arguments] and prints, for each, the hyperparameters that the job's
container would get, or the error's text.
"""

import json
import sys
from unittest import mock

import sagemaker
from sagemaker import estimator as estimators
from sagemaker import fw_utils
from sagemaker.huggingface import HuggingFace
from sagemaker.pytorch import PyTorch
from sagemaker.tensorflow import TensorFlow

CLASSES = {"HuggingFace": HuggingFace, "PyTorch": PyTorch, "TensorFlow": TensorFlow}
ROLE = "arn:aws:iam::123456789012:role/role"


def offline() -> sagemaker.Session:
    session = mock.MagicMock()
    session.boto_region_name = "us-east-1"
    session.default_bucket.return_value = "bucket"
    session.default_bucket_prefix = None
    session.local_mode = False
    session.config = {}
    session.sagemaker_config = {}
    session.settings = sagemaker.session_settings.SessionSettings()
    return session


def sent(name: str, arguments: dict) -> dict:
    session = offline()
    estimator = CLASSES[name](role=ROLE, sagemaker_session=session, **arguments)
    code = fw_utils.UploadedCode(s3_prefix="s3://bucket/code.tar.gz", script_name="train.py")
    with mock.patch.object(estimators, "tar_and_upload_dir", return_value=code):
        estimator._prepare_for_training("job")
    return estimator.hyperparameters()


def said(name: str, arguments: dict) -> dict:
    try:
        return {"hyperparameters": sent(name, arguments)}
    except ValueError as error:
        return {"error": str(error)}


print(json.dumps([said(name, arguments) for name, arguments in json.load(sys.stdin)]))
