#!/bin/sh
# Makes the bucket, the policies and the two users. Safe to repeat.
set -eu
mc alias set minio http://minio:9000 "$MINIO_ROOT_USER" "$MINIO_ROOT_PASSWORD"
mc mb --ignore-existing minio/weights
for role in sender receiver; do
    sed -e 's|BUCKET|weights|g' -e 's|PREFIX|policy|g' "/policies/$role.json" > "/tmp/$role.json"
    mc admin policy create minio "dcr-s3-$role" "/tmp/$role.json"
done
mc admin user add minio sender "$SENDER_SECRET"
mc admin user add minio receiver "$RECEIVER_SECRET"
for role in sender receiver; do
    mc admin policy attach minio "dcr-s3-$role" --user "$role" || true
done
mc ilm rule add --expire-days 1 --prefix policy/doctor/ minio/weights || true
