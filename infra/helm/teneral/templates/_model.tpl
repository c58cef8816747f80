{{/* Of a model's instances, those of a version with this percentage of its traffic; rounded up. */}}
{{- define "teneral.share" -}}
{{- div (add (mul (int .count) (int .weight)) 99) 100 -}}
{{- end -}}

{{/* Keys that a model need not have; the pool file's own defaults. */}}
{{- define "teneral.defaults" -}}
min_warm: 0
max_instances: 3
buffer: 0
gpu: 0
disk: ""
idle_timeout_s: 300
target_concurrency: 8
queue_timeout_s: 60
request_timeout_s: 300
drain_s: 25
ready_path: /readyz
volumes: [{name: scratch, path: /tmp, size: 1Gi}]
{{- end -}}

{{/* Whole seconds, rounded up, at least one. */}}
{{- define "teneral.seconds" -}}
{{- max 1 (int (ceil (float64 .))) -}}
{{- end -}}

{{- define "teneral.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/part-of: teneral
{{- end -}}

{{/* The pod of one version. */}}
{{- define "teneral.pod" -}}
serviceAccountName: {{ .base }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (int (include "teneral.seconds" .model.drain_s)) 8 }}
{{- if gt (int .most) 1 }}
topologySpreadConstraints:
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      app.kubernetes.io/name: {{ $.name }}
{{- end }}
{{- end }}
securityContext: {fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch}
{{- with .model.pod }}
{{ toYaml . }}
{{- end }}
containers:
- name: teneral
  image: {{ .model.image | quote }}
  args: [serve]
  env:
  {{- range $name, $value := merge (dict "TENERAL_MODEL" .version.source) (.model.environment | default dict) }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
  {{- range $name, $key := .model.secrets }}
  - name: {{ $name }}
    valueFrom:
      secretKeyRef:
        name: {{ $.base }}-secrets
        key: {{ $key }}
  {{- end }}
  envFrom:
  - secretRef: {name: {{ .base }}-store, optional: true}
  ports:
  - name: http
    containerPort: 8080
  resources:
    requests: &sizes
      cpu: {{ .model.cpu | quote }}
      memory: {{ .model.memory | quote }}
      {{- if .model.disk }}
      ephemeral-storage: {{ .model.disk | quote }}
      {{- end }}
      {{- if .model.gpu }}
      nvidia.com/gpu: {{ .model.gpu | int | quote }}
      {{- end }}
    limits: *sizes
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
    seccompProfile: {type: RuntimeDefault}
  volumeMounts:
  {{- range .model.volumes }}
  - name: {{ .name }}
    mountPath: {{ .path | quote }}
  {{- end }}
  startupProbe:
    httpGet: {path: /livez, port: 8080}
    periodSeconds: 1
    failureThreshold: 30
  readinessProbe:
    httpGet: {path: {{ .model.ready_path | quote }}, port: 8080}
    periodSeconds: 1
    failureThreshold: 1
  livenessProbe:
    httpGet: {path: /livez, port: 8080}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  lifecycle:
    preStop: {sleep: {seconds: 3}}
volumes:
{{- range .model.volumes }}
- name: {{ .name }}
  emptyDir: {sizeLimit: {{ .size | quote }}}
{{- end }}
{{- end -}}

{{/* A Service in front of one version's pods. */}}
{{- define "teneral.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .service }}
  labels:
    {{- include "teneral.labels" . | nindent 4 }}
spec:
  selector:
    app.kubernetes.io/name: {{ .name }}
  ports:
  - {name: http, port: 8080, targetPort: http}
{{- end -}}

{{/* What scales one version: its least and most, and the trigger. */}}
{{- define "teneral.scaled" -}}
{{- $idle := int (include "teneral.seconds" .model.idle_timeout_s) -}}
{{- $least := .least -}}
{{- if and (eq .least 0) (gt (int .model.buffer) 0) }}{{ $least = add 1 (int .model.buffer) }}{{ end -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels:
    {{- include "teneral.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  {{- if ne (int $least) (int .least) }}
  idleReplicaCount: 0
  {{- end }}
  minReplicaCount: {{ $least }}
  maxReplicaCount: {{ max (int .most) (int $least) }}
  pollingInterval: 5
  cooldownPeriod: {{ $idle }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleUp:
          stabilizationWindowSeconds: 0
          policies:
          - {type: Percent, value: 100, periodSeconds: 5}
        scaleDown:
          stabilizationWindowSeconds: {{ $idle }}
          policies:
          - {type: Percent, value: 100, periodSeconds: 15}
  triggers:
  {{- if gt (int .least) 0 }}
  - type: prometheus
    metricType: AverageValue
    metadata:
      serverAddress: {{ .prometheus | quote }}
      query: {{ printf "sum(teneral_http_in_flight{pod=~\"%s-[a-z0-9]+-[a-z0-9]+\"}) or vector(0)" .name | quote }}
      threshold: {{ .model.target_concurrency | int | quote }}
  {{- else }}
  - type: external-push
    metadata:
      scalerAddress: "keda-add-ons-http-external-scaler.keda:9090"
      interceptorRoute: {{ .name }}
  {{- end }}
{{- end -}}
