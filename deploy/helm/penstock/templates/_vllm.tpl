{{/* Pod of a group of vLLM. Takes (dict "root" $ "isLeader" BOOL). */}}
{{- define "penstock.vllmPod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $vllm := $values.vllm -}}
{{- $own := dict "root" $root "name" "vllm" -}}
metadata:
  labels:
    {{- include "penstock.labels" $own | nindent 4 }}
  {{- with $vllm.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "penstock.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # vLLM ends within five seconds of SIGTERM; streams move to other backends.
  terminationGracePeriodSeconds: {{ add (int $values.drain.preStopSeconds) 30 }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.images.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $vllm.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $vllm.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $vllm.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $vllm.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: vllm
      image: {{ required "vllm.image: an image with vLLM and smg-grpc-servicer, which vllm.enabled needs" $vllm.image }}
      imagePullPolicy: {{ $values.images.pullPolicy }}
      command: [vllm, serve]
      args:
        - {{ include "penstock.model" $root | quote }}
        - {{ printf "--served-model-name=%s" (required "model.servedName: the one name of all backends, which vllm.enabled needs" $values.model.servedName) | quote }}
        {{- if .isLeader }}
        - --grpc
        - --host=0.0.0.0
        - --port={{ include "penstock.port" $own }}
        {{- else }}
        - --headless
        {{- end }}
        {{- if gt (int $vllm.size) 1 }}
        # LeaderWorkerSet sets these variables.
        - --distributed-executor-backend=mp
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port=29500
        {{- end }}
        {{- with include "penstock.options" $vllm.options | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      env:
        # The image's own home is not writable, nor is its user this one.
        - name: HOME
          value: /home/penstock
        - name: USER
          value: penstock
        {{- with include "penstock.env" $own | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- if .isLeader }}
      ports:
        - name: grpc
          containerPort: {{ include "penstock.port" $own }}
      startupProbe:
        grpc:
          port: {{ include "penstock.port" $own }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div (int $vllm.startSeconds) 5) }}
      readinessProbe:
        grpc:
          port: {{ include "penstock.port" $own }}
          service: vllm.grpc.engine.VllmEngine
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        grpc:
          port: {{ include "penstock.port" $own }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ $values.drain.preStopSeconds | quote }}]
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      resources:
        {{- toYaml $vllm.resources | nindent 8 }}
      volumeMounts:
        {{- include "penstock.mounts" $own | trim | nindent 8 }}
  volumes:
    {{- include "penstock.volumes" $own | trim | nindent 4 }}
{{- end -}}
